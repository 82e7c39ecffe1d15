"""Collectives under spmd: the compiler's own. There is no process group, so none can be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from accelbridge.backend import Collectives, Lowering, World
from accelbridge.errors import BackendError
from accelbridge_xla.hardware import PLATFORM_VARIABLE

if TYPE_CHECKING:
    import torch.distributed as dist


class XlaCollectives(Collectives):
    """What GSPMD inserts where annotations ask for it."""

    library = "XLA (GSPMD)"

    def environment(self, world: World) -> Mapping[str, str]:
        # Level 2 keeps XLA's errors and drops its warnings, of which the partitioner prints one per compilation.
        return {PLATFORM_VARIABLE: "TPU", "TF_CPP_MIN_LOG_LEVEL": "2"}

    def lowerings(self) -> Sequence[Lowering]:
        """None: what the partitioner inserts cannot be rewritten from here."""
        return ()

    def init(self, store: dist.Store, world: World, timeout_s: float, check: bool) -> NoReturn:
        raise _no_group()

    def control_group(self, timeout_s: float) -> NoReturn:
        raise _no_group()

    def shutdown(self) -> None:
        return None  # there is nothing to leave


def _no_group() -> BackendError:
    return BackendError(
        "a process group asked; one process drives all devices here and the compiler inserts the collectives; "
        "use Execution, which needs none"
    )
