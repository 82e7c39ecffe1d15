"""Host memory that is used again: pinning is slow, so what was pinned once stays with the pool."""

from __future__ import annotations

import torch
from torch import Tensor

from accelbridge.backend import Offload
from accelbridge.errors import OutOfMemoryError
from accelbridge.memory.advice import size_text


class HostPool:
    """Flat host buffers of bytes, pinned where the backend can; at most ``cap`` bytes of them where that is given.

    A buffer that was given back is taken again only for a copy that is queued after the last one that used it; see
    :meth:`accelbridge.backend.Transfer.order`.
    """

    def __init__(self, offload: Offload, cap: int | None = None) -> None:
        self._offload, self._cap = offload, cap
        self._free: dict[int, list[Tensor]] = {}
        self.held = 0
        """Bytes of all buffers, in use or not."""
        self.high_water = 0
        """The most that was ever held."""
        self.used = 0
        """Bytes of those in use."""

    def take(self, size: int) -> Tensor:
        """A buffer uint8 [n], n >= ``size``. Raises OutOfMemoryError beyond the cap, or where the host has no more."""
        rounded = _rounded(size)
        free = self._free.get(rounded)
        buffer = free.pop() if free else self._new(rounded)
        self.used += rounded
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Give a buffer of :meth:`take` back, or any view of it."""
        size = buffer.untyped_storage().nbytes()
        self.used -= size
        self._free.setdefault(size, []).append(buffer.view(torch.uint8).as_strided((size,), (1,), 0))

    def clear(self) -> None:
        """Free what is not in use."""
        self.held = self.used
        self._free.clear()

    def _new(self, size: int) -> Tensor:
        if self._cap is not None and self.held + size > self._cap:
            self.clear()  # sizes may have changed
            if self.held + size > self._cap:
                raise OutOfMemoryError(
                    f"{size_text(size)} of host memory asked for offloading; {size_text(self.held)} of the "
                    f"{size_text(self._cap)} that memory.host_limit allows are in use; raise memory.host_limit, or set "
                    "memory.activations: device"
                )
        try:
            buffer = self._offload.host_empty((size,), torch.uint8)
        except (MemoryError, RuntimeError) as error:
            raise OutOfMemoryError(
                f"{size_text(size)} of host memory asked for offloading; the host gave none beside the "
                f"{size_text(self.held)} held already ({str(error).splitlines()[0]}); set memory.host_limit, or "
                "memory.activations: device"
            ) from error
        self.held += size
        self.high_water = max(self.high_water, self.held)
        return buffer


def _rounded(size: int) -> int:
    """Up to a multiple of an eighth of the power of two below: few sizes, and at most an eighth too much."""
    step = max(4096, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
