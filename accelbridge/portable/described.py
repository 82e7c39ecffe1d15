"""A backend that is described by data: its claims follow from the chip and the software that its probe found, and its
products are torch's own ``scaled_mm`` or, where that has none, our kernels. No torch until something computes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from accelbridge.backend import (
    FULL,
    Attention,
    Backend,
    Capabilities,
    Implementation,
    Matmul,
    Probe,
    Request,
    Support,
    unsupported,
)
from accelbridge.kernels.fp8_cells import Fp8Kernels
from accelbridge.kernels.tiles import bind
from accelbridge.portable.device_cells import general
from accelbridge.portable.fp8_cells import EMULATED
from accelbridge.portable.known_bad import at_least

if TYPE_CHECKING:
    from accelbridge.kernels.tiles import Tile
    from accelbridge.portable.scaled_mm import Conventions

TRITON = "triton"
"""Name of our own kernels among the candidates."""


class DescribedBackend(Backend):
    """What is left for a vendor: the probe, the tables, which kernels of attention there are and in which order, and
    how its library wants scales to lie."""

    unused: ClassVar[Mapping[str, str]] = {}
    """Packages with fp8 products of their own, and why the plan binds none of them."""

    @classmethod
    @abstractmethod
    def usual_software(cls, torch: str) -> Mapping[str, str]:
        """What comes with this version of torch where it is usually installed from."""

    @abstractmethod
    def attention_candidates(self) -> Sequence[Implementation]:
        """Candidates for ``attention`` on :attr:`here` with :attr:`software`, best first."""

    def tiles(self) -> Mapping[str, Tile]:
        """How the kernels of :mod:`accelbridge.kernels` are compiled for the chip of :attr:`here`; none, where they
        are not."""
        return {}

    @abstractmethod
    def architecture(self) -> str:
        """Of the chip of :attr:`here`, by its compiler's name."""

    @abstractmethod
    def conventions(self, public: bool) -> Conventions:
        """Of the library's products. ``public``: torch has ``torch.nn.functional.scaled_mm``."""

    @abstractmethod
    def library_products(self) -> Mapping[tuple[str, str, str], Support]:
        """Cells of ``scaled_mm`` as torch and the vendor's library alone would have them on :attr:`here`."""

    @abstractmethod
    def fp8_kernels(self) -> Fp8Kernels:
        """Our own kernels on :attr:`here`."""

    @classmethod
    def assume(cls, chip: str, devices: int, software: Mapping[str, str]) -> Probe:
        probe = super().assume(chip, devices, software)
        return replace(probe, software={**cls.usual_software(probe.software["torch"]), **software})

    @cached_property
    def found(self) -> Probe:
        """What the probe found, or was assumed."""
        return self.host or self.probe()

    @property
    def software(self) -> Mapping[str, str]:
        """Versions by name."""
        return self.found.software

    @cached_property
    def here(self) -> Capabilities:
        """Of the chip that was found."""
        return self.capabilities(self.chip(self.found)[0], self.software)

    @cached_property
    def matmul(self) -> Matmul:
        from accelbridge.portable.scaled_mm import TorchScaledMm

        public = at_least(self.software.get("torch"), "2.10")
        quantizing = {key: cell for key, cell in self.here.table.items() if key[0] == "quantize"}
        table = {**quantizing, **self.library_products()}
        return TorchScaledMm(self.name, table, self.conventions(public), self.fp8_kernels())

    @cached_property
    def attention(self) -> Attention:
        from accelbridge.portable.sdpa import SdpaAttention

        return SdpaAttention(self.attention_candidates())

    def implementations(self) -> Sequence[Implementation]:
        from accelbridge.kernels.candidates import layers
        from accelbridge.portable.adamw import FUSED_ADAMW

        ours = layers(self.architecture(), self.tiles(), self.software)
        unused = (_unused(package, why) for package, why in self.unused.items())
        fp8 = (self._library_product(), self._kernel_product(), self._kernel_quantize())
        return (*fp8, *unused, *self.attention.implementations(), *ours, FUSED_ADAMW)

    def _library_product(self) -> Implementation:
        def supports(request: Request) -> Support:
            cell = self.library_products().get((request.op, request.dtype, request.variant))
            if cell is None:
                return unsupported(f"torch has no scaled_mm of {request.dtype}, {request.variant}")
            found = cell.within(request.shape)
            return FULL if found.level == "full" else unsupported(found.reason.removesuffix(f"; {EMULATED.reason}"))

        launches = ("aten::_scaled_mm", "aten::_scaled_mm_v2")
        return Implementation("scaled_mm", "torch_scaled_mm", supports, self._load_product, launches=launches)

    def _kernel_product(self) -> Implementation:
        def supports(request: Request) -> Support:
            return self.fp8_kernels().product(general(request.variant)).within(request.shape)

        def load() -> Callable[..., Any]:
            from accelbridge.kernels.scaled_mm import scaled_mm

            bind(self.fp8_kernels().tiles)
            return scaled_mm

        launches = ("accelbridge::scaled_mm",)
        return Implementation("scaled_mm", TRITON, supports, load, launches=launches)

    def _kernel_quantize(self) -> Implementation:
        def load() -> Callable[..., Any]:
            from accelbridge.kernels.quantize import quantize

            bind(self.fp8_kernels().tiles)
            return quantize

        launches = ("accelbridge::quantize", "accelbridge::quantize_by")
        return Implementation("quantize", TRITON, lambda _: self.fp8_kernels().quantize(), load, launches=launches)

    def _load_product(self) -> Callable[..., Any]:
        return self.matmul.scaled_mm


def _unused(package: str, why: str) -> Implementation:
    def supports(request: Request) -> Support:
        return unsupported(why if find_spec(package) else "it is not installed")

    def load() -> NoReturn:
        raise AssertionError(f"{package} serves nothing")

    return Implementation("scaled_mm", package, supports, load)
