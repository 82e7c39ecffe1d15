"""``backend.options`` of the Neuron backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from accelbridge.config import Section


class NeuronOptions(Section):
    """Options of the Neuron backend."""

    groups: Literal["mixed", "neuron"] = "mixed"
    """``mixed`` asks for ``cpu:gloo,neuron:neuron``, which no document of the vendor shows; where it is refused,
    ``neuron`` does without: the default group then moves no host tensors and no objects, and torch's own asynchronous
    checkpoint has nothing to run on. Runs of accelbridge lose nothing, whose control group is gloo's either way."""
    fallback_ops: list[str] = Field(default_factory=list)
    """Ops ("aten::sort") that may run on the host in a step. Any other that does so ends the run."""
    neff_cache: str | None = None
    """Folder of compiled programs (TORCH_NEURONX_NEFF_CACHE_DIR); None: the vendor's default."""
