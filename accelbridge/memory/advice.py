"""Out of memory, turned into advice: what takes the memory of this run, and which setting would save how much.

Parameters and optimizer state are added up from this run's tensors; activations of a decoder are measured on fake
tensors (``accelbridge.memory.budget``), once for every setting that would change them. An option is named only where it
is not in force yet and the layout takes it. Savings are per device, of one option alone; they don't add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from accelbridge.errors import AccelbridgeError, ConfigError, OutOfMemoryError
from accelbridge.memory.budget import Activations, measure
from accelbridge.memory.choice import DEFAULT, Recompute
from accelbridge.memory.use import held
from accelbridge.models.shapes import DECODER_SPEC, decoder_shapes
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import check_data_parallel
from accelbridge.train.check import check_tensor_parallel
from accelbridge.train.prepare import Prepared

if TYPE_CHECKING:
    from accelbridge.train.trainer import Trainer


@dataclass(frozen=True)
class Option:
    """A setting that would save memory."""

    setting: str
    """``"train.microbatch_size 8 -> 4"``."""
    saves: int
    """Bytes per device, an estimate."""
    cost: str


@contextmanager
def explained_out_of_memory(trainer: Trainer) -> Iterator[None]:
    """Turn an out-of-memory error of the device into an OutOfMemoryError with :func:`advice`."""
    try:
        yield
    except Exception as error:
        device = trainer.prepared.target.backend.device
        if isinstance(error, AccelbridgeError) or not device.is_out_of_memory(error):
            raise
        raise OutOfMemoryError(advice(trainer, error)) from error


def advice(trainer: Trainer, error: BaseException) -> str:
    """What the user should know of an out-of-memory ``error``: what takes the memory, and what to set."""
    prepared, model = trainer.prepared, getattr(trainer, "model", None)
    rank, step = prepared.world.rank, trainer.step + 1
    reason = " ".join(str(error).split())[:300]
    if model is None:
        kinds: dict[str, int] = {}
        where = "before the first step"
    else:
        kinds = held(model, getattr(trainer, "optimizer", None))
        where = f"in step {step}"
    estimates = Estimates(prepared, kinds)
    lines = [f"memory ran out {where} on rank {rank}: {reason}", f"what takes it here: {_taken(trainer, estimates)}"]
    options = sorted(estimates.options(), key=lambda option: option.saves, reverse=True)
    lines += ["what would save some, most first:" if options else "no setting known here would save some"]
    lines += [f"  {option.setting}: saves about {size_text(option.saves)}; {option.cost}" for option in options]
    return "\n".join(lines)


def _taken(trainer: Trainer, estimates: Estimates) -> str:
    kinds = dict(estimates.kinds)
    total = trainer.prepared.target.backend.device.memory()["peak"]
    names = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer state"}
    parts = [f"{names[kind]} {size_text(size)}" for kind, size in kinds.items()]
    parts += [f"gathered parameters {size_text(estimates.gathered)} (estimate)"] if estimates.gathered else []
    known = sum(kinds.values()) + estimates.gathered
    if estimates.activations is not None:
        parts.append(f"activations of a microbatch {size_text(estimates.activations)} (estimate)")
        known += estimates.activations
    elif kinds:
        parts.append("activations of a microbatch unknown, as the model is your own")
    if total is not None:
        parts.append(f"everything else at most {size_text(max(0, total - known))} of the peak so far")
    return ", ".join(parts)


class Estimates:
    """Bytes per device of a run, and of the same run with one setting changed. ``kinds``: see :func:`held`."""

    def __init__(self, prepared: Prepared, kinds: dict[str, int]) -> None:
        self._prepared = prepared
        self._layout, self._size = prepared.layout, prepared.microbatch_size
        self.kinds = kinds
        precision = prepared.config.precision
        parameters = kinds.get("parameters", 0) // _width(precision.params)
        whole = parameters * self._layout.dp_shard
        sharded = self._layout.dp_shard > 1
        self.gathered = whole * _width(precision.arithmetic) if sharded and self._layout.zero < 3 else 0
        """Parameters that stay whole within a step (ZeRO 1 and 2)."""
        accumulates = sharded and self._layout.zero == 1 and prepared.microbatches > 1
        self.whole_gradients = whole * _width(precision.reduce) if accumulates else 0
        """Gradients that add up whole over the microbatches (ZeRO 1)."""
        self.activations = self._activations()

    def _activations(
        self,
        *,
        size: int | None = None,
        layout: Layout | None = None,
        dtype: str | None = None,
        recompute: Recompute | None = None,
    ) -> int | None:
        """Bytes of activations of a microbatch; None for a model that is not the recipe's."""
        config = self._prepared.config
        if config.model is None:
            return None
        kept = measure(
            config.model,
            layout or self._layout,
            (size or self._size, config.train.seq_len),
            dtype or config.precision.arithmetic,
            self._prepared.plan.loaders,
            segments=config.data.document_mask,
        )
        return _total(kept, config.model.layers, recompute or self._prepared.recompute)

    def options(self) -> Iterator[Option]:
        """What would save something and is possible here."""
        for make in (self._microbatch, self._recompute, self._zero, self._shard, self._tp, self._dtype):
            yield from (option for option in make() if option.saves > 0)

    def _saved(self, activations: int | None) -> int:
        if self.activations is None or activations is None:
            return 0
        return self.activations - activations

    def _microbatch(self) -> Iterator[Option]:
        less = next((n for n in range(self._size - 1, 0, -1) if self._size % n == 0), None)
        if less is None:
            return
        times = self._size // less
        cost = f"the same global batch in {times} times as many microbatches, each with less work for the device"
        setting = f"train.microbatch_size {self._size} -> {less}"
        if self.activations is not None:
            yield Option(setting, self._saved(self._activations(size=less)), cost)
        elif self.kinds:  # activations grow with the rows, whatever the model
            peak = self._prepared.target.backend.device.memory()["peak"] or 0
            rest = max(0, peak - sum(self.kinds.values()))
            yield Option(setting, rest * (times - 1) // times, f"at most, as the model is your own; {cost}")

    def _recompute(self) -> Iterator[Option]:
        config, now = self._prepared.config, self._prepared.recompute
        if config.model is None or not self._prepared.target.capabilities.recompute or now.kind == "full":
            return
        full = Recompute("full")
        yield Option(
            f"memory.recompute {now.kind} -> full",
            self._saved(self._activations(recompute=full)),
            "every layer's forward pass runs twice, about a third more computing",
        )
        if now.kind == "none":
            yield Option(
                "memory.recompute none -> selective",
                self._saved(self._activations(recompute=Recompute("selective", DEFAULT))),
                f"{', '.join(DEFAULT)} run twice, a few percent more computing",
            )

    def _zero(self) -> Iterator[Option]:
        if not self.gathered:
            return
        units = self._prepared.config.model.layers if self._prepared.config.model else 2
        freed = self.gathered - self.gathered * min(2, units) // units  # about two units are whole at a time
        yield Option(
            f"parallel.zero {self._layout.zero} -> 3",
            freed + self.whole_gradients,
            "parameters are gathered once more, for the backward pass, and again for every microbatch",
        )
        yield Option(
            "parallel.zero 1 -> 2", self.whole_gradients, "gradients are reduced after every microbatch, not once"
        )

    def _shard(self) -> Iterator[Option]:
        layout, state = self._layout, sum(self.kinds.values())
        wider = replace(layout, dp_shard=layout.dp_shard * 2)
        setting = f"parallel.dp_shard {layout.dp_shard} -> {wider.dp_shard}"
        if "dp_shard" not in self._prepared.target.capabilities.layout_axes or not self._takes(wider):
            return
        if layout.dp_replicate % 2 == 0:
            fewer = layout.dp_replicate // 2
            setting += f" with parallel.dp_replicate {layout.dp_replicate} -> {fewer}"
            yield Option(setting, state // 2, "the same devices; parameters are gathered from twice as many")
        elif self._prepared.config.train.global_batch_size % (2 * layout.data_parallel) == 0:
            yield Option(setting, state // 2, "twice the devices")

    def _tp(self) -> Iterator[Option]:
        layout = self._layout
        split = replace(layout, tp=layout.tp * 2, dp_shard=layout.dp_shard // 2)
        possible = layout.dp_shard % 2 == 0 and "tp" in self._prepared.target.capabilities.layout_axes
        if not possible or not self._takes(split):
            return
        yield Option(
            f"parallel.tp {layout.tp} -> {split.tp} with parallel.dp_shard {layout.dp_shard} -> {split.dp_shard}",
            self._saved(self._activations(layout=split)),
            "the same devices; collectives within every layer, and twice the microbatches at the same global batch",
        )

    def _dtype(self) -> Iterator[Option]:
        precision, capabilities = self._prepared.config.precision, self._prepared.target.capabilities
        if precision.compute == "float32" and capabilities.support("linear", "bfloat16"):
            saves = self._saved(self._activations(dtype="bfloat16"))
            yield Option(
                "precision.compute float32 -> bfloat16", saves, "8 bits of significand in products: other losses"
            )

    def _takes(self, layout: Layout) -> bool:
        """Whether the decoder of the recipe can be laid out so; of another model it is not known."""
        config = self._prepared.config
        return config.model is not None and _passes(
            lambda: check_tensor_parallel(layout, config.model, config.train.seq_len),
            lambda: check_data_parallel(layout, DECODER_SPEC, decoder_shapes(config.model)),  # pyright: ignore[reportArgumentType]
        )


def _passes(*checks: Callable[[], None]) -> bool:
    try:
        for check in checks:
            check()
    except ConfigError:
        return False
    return True


def _total(kept: Activations, layers: int, recompute: Recompute) -> int:
    """Bytes at the highest point: between forward and backward, and while one recomputed layer is whole again."""
    if recompute.kind == "none":
        return kept.outside + layers * kept.layer
    units = layers if recompute.units is None else recompute.units
    each = kept.entry if recompute.kind == "full" else kept.selective(recompute.ops)
    return kept.outside + (layers - units) * kept.layer + units * each + max(0, kept.layer - each)


def _width(dtype: str) -> int:
    return getattr(torch, dtype).itemsize


def size_text(size: int) -> str:
    """``"1.5 GiB"``, ``"12.0 MiB"``, ``"3.1 KiB"``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size / 2**10:.1f} KiB"
