"""What of a kernel differs from chip to chip, as data, and the table from which launches take it. No triton, no torch.

    bind({"quantize_rows": Tile({"BLOCK": 4096}, warps=8)})     # a backend, once, when its plan is bound
    kernel[grid](x, y, **tile("quantize_rows").launch)          # a launcher

A name is that of the kernel, or ``"<kernel>.<variant>"`` where variants of one kernel need blocks of their own, as
``flash_forward.128`` does for heads of 128.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelbridge.errors import BackendError, did_you_mean


@dataclass(frozen=True)
class Tile:
    """How one kernel is compiled for one chip."""

    blocks: Mapping[str, int]
    """Constants of the kernel that say how much a program handles at a time, by the names of its parameters."""
    warps: int = 4
    """Warps (or wavefronts) of a program."""
    stages: int = 2
    """Stages of loads that are in flight in a loop."""
    options: Mapping[str, int] = field(default_factory=dict)
    """Options that only one vendor's compiler knows."""

    @property
    def launch(self) -> dict[str, Any]:
        """What a launch is given by keyword besides the kernel's own arguments."""
        return {**self.blocks, "num_warps": self.warps, "num_stages": self.stages, **self.options}


_TABLE: dict[str, Tile] = {}


def bind(table: Mapping[str, Tile]) -> None:
    """Make ``table`` what :func:`tile` looks up, in this whole process. One process drives chips of one kind: a name
    that is bound already, to another tile, raises ``BackendError``, and nothing is bound."""
    for name, each in table.items():
        if _TABLE.get(name, each) != each:
            raise BackendError(
                f'kernel "{name}" asked to be compiled with {each}; this process has compiled it with {_TABLE[name]}; '
                "bind one chip's tiles, or reset() first"
            )
    _TABLE.update(table)


def tile(name: str) -> Tile:
    """The tile that was bound as ``name``. Raises ``BackendError`` where none was."""
    found = _TABLE.get(name)
    if found is None:
        raise BackendError(
            f'kernel "{name}" asked to run; no tile is bound for it{did_you_mean(name, list(_TABLE))}; bound are '
            f"{', '.join(_TABLE) or 'none'}; take the kernel from a backend's plan, or bind() tiles first"
        )
    return found


def bound() -> dict[str, Tile]:
    """What is bound now."""
    return dict(_TABLE)


def reset() -> None:
    """Forget all tiles."""
    _TABLE.clear()
