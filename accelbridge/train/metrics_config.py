"""The ``metrics`` section of a recipe. Free of torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from accelbridge.config import Section


class MetricsConfig(Section):
    """What a run writes about its progress, and how often the host waits for the device to learn it."""

    interval: Annotated[int, Field(ge=1)] = 10
    """Steps between two reads of device values; the host waits for the device only then."""
    tensorboard: bool = False
    """Also write TensorBoard event files to ``OUTPUT/tensorboard`` (needs ``accelbridge[tensorboard]``)."""
