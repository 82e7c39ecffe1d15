"""The ``guards`` section of a recipe: what stops or mends a run whose numbers go wrong. Free of torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from accelbridge.config import Section


class SpikeConfig(Section):
    """Losses far above those before them, found on the host from the losses that are read at ``metrics.interval``.

    A loss is a spike above ``median + threshold * 1.4826 * MAD`` of the last ``window`` finite ones, where MAD is the
    median absolute deviation; 1.4826 of it is the standard deviation of normally distributed losses.
    """

    window: Annotated[int, Field(ge=8, le=100_000)] = 100
    """Losses before it that a loss is judged by; none is judged before there are so many, after a start as well."""
    threshold: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 8.0
    """Robust standard deviations above the median, from which on a loss is a spike."""
    action: Literal["warn", "stop", "rollback"] = "warn"
    """warn: an event and a line. stop: every rank stops. rollback: back to the newest checkpoint from before the
    window, and past the data of the steps from there to the spike."""
    max_rollbacks: Annotated[int, Field(ge=1)] = 3
    """Rollbacks of one process; the next spike stops the run."""


class GuardsConfig(Section):
    """What is done about a loss or gradient that is NaN or infinite, and about loss spikes."""

    nonfinite: Literal["stop", "skip"] = "stop"
    """An update whose loss or gradient is not finite on any rank is never made. stop: nor is any other until the
    metrics are read; then every rank stops. skip: the run goes on. (Overflows of float16 belong to the loss scale.)"""
    max_skips: Annotated[int, Field(ge=1)] = 10
    """skip: so many updates in a row may be skipped; one more stops the run."""
    spike: SpikeConfig | None = None
    """Absent: losses are not watched."""
