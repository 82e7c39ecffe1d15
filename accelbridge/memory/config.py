"""``memory.recompute`` as typed data. Free of torch."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag, model_validator

from accelbridge.config import Section

_FACTORS = {f"{letter}{unit}": base**power for power, letter in enumerate("KMGT", 1) for unit, base in
            (("B", 1000), ("iB", 1024))} | {"": 1, "B": 1}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_MOST = 1 << 63


def size_in_bytes(value: Any, what: str = "budget") -> Any:
    """Bytes of 200, "200MiB" or "1.5GB" (KB = 1000, KiB = 1024). Raises ValueError for what is no size; None passes."""
    if value is None:
        return None
    number, factor = value, 1
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        known = {name.lower(): size for name, size in _FACTORS.items()}
        if match is None or match[2].lower() not in known:
            raise ValueError(f'{what} asked as "{value[:40]}"; {_TAKES}')
        number, factor = float(match[1]), known[match[2].lower()]
    elif isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{what} asked as {str(value)[:40]} ({type(value).__name__}); {_TAKES}")
    size = int(number * factor)
    if not 0 < size < _MOST:
        raise ValueError(f"{what} asked as {str(value)[:40]}; {_TAKES}")
    return size


_TAKES = 'it takes a number of bytes above 0, or text with a unit; write for example 200MiB or "1.5GB"'


class Selective(Section):
    """Recomputation by op: those named, or the cheapest ones that a budget takes."""

    ops: list[str] | None = None
    """Semantic ops to recompute; the outputs of every other one are kept."""
    budget: Annotated[int | None, BeforeValidator(size_in_bytes)] = None
    """Bytes of activations that a device may hold between forward and backward: 200MiB, 1.5GB or a number."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> Selective:
        if (self.ops is None) == (self.budget is None):
            found = "neither" if self.ops is None else "both"
            raise ValueError(f"ops or budget asked, one of the two; {found} is given; write one of them")
        if self.ops is not None and not self.ops:
            raise ValueError("ops asked as an empty list, which recomputes nothing; write memory.recompute: none")
        return self


def _form(value: Any) -> str:
    return "section" if isinstance(value, dict | Selective) else "word"


RecomputeSetting = Annotated[
    Annotated[Literal["none", "selective", "full"], Tag("word")] | Annotated[Selective, Tag("section")],
    Discriminator(_form),
]
"""``none``, ``full``, ``selective`` (the default list, see :data:`accelbridge.memory.choice.DEFAULT`), or which ops."""
