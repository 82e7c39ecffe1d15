"""The ``metrics`` section of a recipe. Free of torch."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from accelbridge.config import Section

_RANGE = re.compile(r"(\d{1,18}):(\d{1,18})")


def step_range(text: str) -> range:
    """The steps of ``"10:12"``: 10, 11 and 12. Raises ValueError for what is no range of steps."""
    match = _RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f'profile asked as "{text[:40]}"; it takes FIRST:LAST, steps numbered from 1, both included; write for '
            "example 10:12"
        )
    return range(first, last + 1)


def _checked(text: str) -> str:
    step_range(text)
    return text


class MetricsConfig(Section):
    """What a run writes about its progress, and how often the host waits for the device to learn it."""

    interval: Annotated[int, Field(ge=1)] = 10
    """Steps between two reads of device values; the host waits for the device only then."""
    tensorboard: bool = False
    """Also write TensorBoard event files to ``OUTPUT/tensorboard`` (needs ``accelbridge[tensorboard]``)."""
    profile: Annotated[str, AfterValidator(_checked)] | None = None
    """``FIRST:LAST``: record these steps with torch.profiler, as a Chrome trace per rank in ``OUTPUT/profile``."""

    @property
    def profiled_steps(self) -> range:
        """The steps of ``profile``; empty without it."""
        return step_range(self.profile) if self.profile else range(0)
