"""What a run would hold per device, added up: no device, no compiler, no weights.

Parameters, gradients and optimizer state follow from the shapes of the recipe's decoder and the layout; activations are
measured on fake tensors (:mod:`accelbridge.memory.budget`). What an allocator or a library takes on top is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from accelbridge.errors import ConfigError
from accelbridge.memory.advice import Estimates, Option
from accelbridge.models.shapes import DECODER_SPEC, decoder_shapes
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import split_dim
from accelbridge.train.config import TrainConfig
from accelbridge.train.groups import rules
from accelbridge.train.prepare import Prepared

EVIDENCE = "arithmetic, not run"
UNITS_GATHERED = 2
"""Layers that are whole at a time under ZeRO 3: the one that computes, and the next one on its way."""


@dataclass(frozen=True)
class Arithmetic:
    """Bytes per device by kind, and FLOPs of a step."""

    parameters: int
    """Of the whole model: their number."""
    memory: Mapping[str, int]
    capacity: int | None
    flops: float
    """Of a step on one device, forward and backward: ``ModelConfig.flops_per_token``, shared out evenly."""
    options: Sequence[Option]
    """What would save some, where it does not fit."""

    @property
    def total(self) -> int:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool | None:
        """None: the memory of the device is not known."""
        return None if self.capacity is None else self.total <= self.capacity


def estimate(prepared: Prepared) -> Arithmetic:
    """The estimate of a prepared run. Raises ConfigError for a model that is not the recipe's."""
    config, layout = prepared.config, prepared.layout
    if config.model is None:
        raise ConfigError(f"model is missing from {config.places.source}; an estimate needs its sizes; add the section")
    eager = prepared.target.backend.execution.model == "eager"
    kinds = state_bytes(config, layout, parts_at_rest=eager)
    estimates = Estimates(prepared, kinds)
    memory = dict(kinds)
    if whole := _gathered(config, layout) or (estimates.gathered if eager else 0):
        memory["gathered parameters"] = whole
    if eager and estimates.whole_gradients:
        memory["whole gradients"] = estimates.whole_gradients
    assert estimates.activations is not None, "the model is the recipe's"
    memory["activations"] = estimates.activations
    tokens = config.train.global_batch_size * config.train.seq_len
    flops = config.model.flops_per_token(config.train.seq_len) * tokens / layout.size
    capacity = capacity_of(prepared)
    fits = capacity is None or sum(memory.values()) <= capacity
    options = () if fits else sorted(estimates.options(), key=lambda option: option.saves, reverse=True)
    return Arithmetic(config.model.parameter_count(), memory, capacity, flops, tuple(options))


def state_bytes(config: TrainConfig, layout: Layout, *, parts_at_rest: bool) -> dict[str, int]:
    """Bytes per device of ``parameters``, ``gradients`` and ``optimizer`` state (two moments of AdamW), by shape.

    ZeRO 1 shards the state over dp_shard, 2 the gradients too, 3 the parameters too; with ``parts_at_rest`` (eager
    execution) all three lie in parts, and what a lower stage keeps whole is a copy beside them. Tensor parallelism
    splits what the decoder's sharding spec says. Parts are those of the device that holds the most.
    """
    assert config.model is not None
    shapes = decoder_shapes(config.model)
    width = getattr(torch, config.precision.params).itemsize
    rule = rules(shapes, config.optimizer)
    sizes = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for name, shape in shapes.items():
        own = _split(name, shape, layout)
        shard = _ceil(own, layout.dp_shard)
        sizes["parameters"] += width * (shard if parts_at_rest or layout.zero >= 3 else own)
        if not rule[name].frozen:
            sizes["gradients"] += width * (shard if parts_at_rest or layout.zero >= 2 else own)
            sizes["optimizer"] += 2 * width * shard
    return sizes


def _split(name: str, shape: Sequence[int], layout: Layout) -> int:
    """Elements of a device's tensor-parallel part."""
    owner, _, attribute = name.rpartition(".")
    style = DECODER_SPEC.style(owner)
    dim = split_dim(style, attribute) if style is not None and layout.tp > 1 else None
    return prod(_ceil(n, layout.tp) if i == dim else n for i, n in enumerate(shape))


def _gathered(config: TrainConfig, layout: Layout) -> int:
    """Layers that ZeRO 3 holds whole while they compute; the root's own parameters stay whole within a step."""
    assert config.model is not None
    if layout.dp_shard == 1 or layout.zero < 3:
        return 0
    width = getattr(torch, config.precision.arithmetic).itemsize
    whole = {name: _split(name, shape, layout) for name, shape in decoder_shapes(config.model).items()}
    layer = sum(size for name, size in whole.items() if name.startswith("layers.0."))
    root = sum(size for name, size in whole.items() if not name.startswith("layers."))
    return width * (min(UNITS_GATHERED, config.model.layers) * layer + root)


def capacity_of(prepared: Prepared) -> int | None:
    """Memory of the device: what the probe saw, else what the backend knows of the chip."""
    seen = [device.memory_bytes for device in prepared.target.selection.probe.devices]
    if seen and all(size is not None for size in seen):
        return min(size for size in seen if size is not None)
    return prepared.target.capabilities.chip.memory_bytes


def _ceil(size: int, ways: int) -> int:
    return -(-size // ways)
