"""The device of the process: all local chips behind one virtual device."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from accelbridge.backend import Device, World
from accelbridge_xla import hardware
from accelbridge_xla.vendor import sdk


@contextmanager
def _logging_untouched() -> Iterator[None]:
    """torch_xla gives the root logger a handler when it is imported, and warns whenever a precision is set."""
    handlers = list(logging.root.handlers)
    logging.root.addHandler(logging.NullHandler())
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers


class XlaDevice(Device):
    """``xla:0`` under spmd stands for all devices of the process."""

    type = "xla"

    def count(self) -> int:
        return hardware.find().count

    def bind(self, world: World) -> torch.device:
        with _logging_untouched():
            runtime = sdk("runtime")
            if not runtime.is_spmd():  # for the whole process; it cannot be undone
                runtime.use_spmd()
                # Otherwise a TPU multiplies float32 matrices in one bfloat16 pass.
                sdk("backends").set_mat_mul_precision("highest")
        return sdk().device()

    def synchronize(self) -> None:
        sdk().sync(wait=True)

    def memory(self) -> Mapping[str, int | None]:
        if hardware.find().chip == hardware.VIRTUAL:  # XLA's CPU client does not implement it
            return {"allocated": None, "peak": None, "total": None}
        info = sdk("core.xla_model").get_memory_info()
        names = {"allocated": "bytes_used", "peak": "peak_bytes_used", "total": "bytes_limit"}
        return {ours: info.get(theirs) for ours, theirs in names.items()}

    def is_out_of_memory(self, error: BaseException) -> bool:
        # The status of XLA's runtime (absl::StatusCode) in the text of a RuntimeError; its CPU client leaves it out
        # (torch_xla 2.9.0).
        told = any(text in str(error) for text in ("RESOURCE_EXHAUSTED", "Out of memory allocating"))
        return (isinstance(error, RuntimeError) and told) or super().is_out_of_memory(error)

    def reset_peak_memory(self) -> None:
        return None  # the runtime keeps one peak for the life of the process

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)
        sdk().manual_seed(seed)

    def rng_state(self) -> Mapping[str, Tensor]:
        state = np.array([sdk("core.xla_model").get_rng_state()], dtype=np.uint64)
        return {"host": torch.get_rng_state(), "device": torch.from_numpy(state.view(np.uint8).copy())}

    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(state["host"])
        sdk("core.xla_model").set_rng_state(int(state["device"].numpy().view(np.uint64)[0]))
