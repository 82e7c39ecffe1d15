"""Choosing recomputation by a budget: what a decoder's activations take, and the cheapest way to fit.

Measured, not modelled: one and two layers of the decoder run on fake tensors (shapes and dtypes, no memory, no
device) with the ops that the plan has chosen, and the storages that autograd keeps are added up. What a layer keeps
is the difference of the two; the rest (embedding, norm, logits, loss) is the same for any depth.

The budget is for what one microbatch keeps between forward and backward. In the backward pass one unit's full
activations come on top of it, while that unit runs again; parameters, gradients and optimizer state are not in it.
Under ``train.compile`` the compiler may keep less than what is counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from accelbridge import ops
from accelbridge.backend import Mask
from accelbridge.errors import ConfigError
from accelbridge.memory.choice import Recompute
from accelbridge.memory.kept import Call, Output, Record
from accelbridge.models.config import ModelConfig
from accelbridge.models.decoder import Decoder
from accelbridge.parallel.layout import Layout

Loaders = Mapping[str, Callable[[], Callable[..., Any]]]
Sizes = dict[int, int]
"""Bytes by storage."""
FLOPS_PER_ELEMENT = 10
"""What an op that is no product is taken to cost per element of its result."""


@dataclass(frozen=True)
class Activations:
    """Bytes that a decoder keeps for the backward pass of one microbatch, per device."""

    outside: int
    """Outside the layers, whatever is recomputed: embedding, last norm, logits and loss."""
    layer: int
    """A layer, nothing recomputed."""
    entry: int
    """What a recomputed layer keeps in any case: its input."""
    kept: Mapping[str, Sizes]
    """What each op keeps in a recomputed layer if it is not recomputed itself."""
    flops: Mapping[str, int]
    """What recomputing each op of a layer costs."""
    notes: tuple[str, ...] = ()

    def selective(self, recomputed: tuple[str, ...]) -> int:
        """Bytes of a layer in which these ops are recomputed."""
        storages: Sizes = {}
        for op, sizes in self.kept.items():
            storages |= {} if op in recomputed else sizes
        return self.entry + sum(storages.values())

    def cost(self, recomputed: tuple[str, ...]) -> int:
        """FLOPs of recomputing these ops in a layer."""
        return sum(self.flops[op] for op in recomputed)


def choose(activations: Activations, layers: int, budget: int) -> Recompute:
    """The recomputation that costs the fewest FLOPs within ``budget`` bytes; of equals, that with the fewest bytes.

    Every set of ops is tried on as few layers as will do. Raises ConfigError if nothing fits.
    """
    everything = tuple(activations.kept)
    whole = activations.outside + layers * activations.layer
    if whole <= budget:
        return Recompute(note=_note(f"none, {_size(whole)} of {_size(budget)} budget", activations))
    found: list[tuple[int, int, int, tuple[str, ...]]] = []
    for recomputed in (s for n in range(1, len(everything) + 1) for s in combinations(everything, n)):
        saved = activations.layer - activations.selective(recomputed)
        units = -((budget - whole) // saved) if saved > 0 else layers + 1
        if units <= layers:
            found.append((units * activations.cost(recomputed), whole - units * saved, units, recomputed))
    if not found:
        raise _too_small(activations, layers, budget)
    _, size, units, recomputed = min(found)
    kind = "full" if recomputed == everything else "selective"
    what = "every op" if kind == "full" else f"selective {', '.join(recomputed)}"
    note = f"{what} in {units} of {layers} units; activations {_size(size)} of {_size(budget)} budget"
    return Recompute(kind, () if kind == "full" else recomputed, units, _note(note, activations))


def _note(text: str, activations: Activations) -> str:
    return "; ".join([f"recompute: {text}", *activations.notes])


def _too_small(activations: Activations, layers: int, budget: int) -> ConfigError:
    least = activations.outside + layers * activations.entry
    return ConfigError(
        f"memory.recompute.budget {budget} bytes asked; the least is {least} bytes, with every layer recomputed in "
        f"full: {activations.outside} outside the layers (embedding, last norm, logits, loss) and {layers} layer "
        f"inputs of {activations.entry}; set {least} or more, a smaller train.microbatch_size, or a shorter "
        "train.seq_len"
    )


def _size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**23 else f"{size / 2**10:.1f} KiB"


# -------------------------------------------------------------------------------------------------- measuring


def measure(
    model: ModelConfig,
    layout: Layout,
    shape: tuple[int, int],
    dtype: str,
    loaders: Loaders,
    *,
    segments: bool,
    chunked_loss: bool = False,
) -> Activations:
    """What a decoder keeps on one device of ``layout`` for a microbatch of ``shape`` (sequences, tokens each),
    computed in ``dtype`` by the implementations that ``loaders`` return (the portable ones elsewhere).

    An implementation that cannot run on fake host tensors is measured by a stand-in, which the notes say.
    """
    local = _local(model, layout.tp)
    before = ops.bound()
    try:
        run = _Run(local, 1, shape, dtype, segments, chunked_loss)
        table, notes = _usable(run, loaders)
        ops.reset()
        ops.bind(table)
        one, two = run.plain(), replace(run, layers=2).plain()
        return _activations(run, one, two - one, layout, notes)
    finally:
        ops.bind(before)


def _local(model: ModelConfig, tp: int) -> ModelConfig:
    """The decoder whose whole shapes are the local ones of tensor parallel; hidden activations are whole there."""
    if tp == 1:
        return model
    sizes = {
        "heads": model.heads // tp,
        "kv_heads": max(model.resolved_kv_heads // tp, 1),
        "head_dim": model.resolved_head_dim,
        "ffn_dim": model.resolved_ffn_dim // tp,
        "vocab_size": -(-model.vocab_size // tp),
    }
    return model.model_copy(update=sizes)


def _activations(run: _Run, one: int, layer: int, layout: Layout, notes: tuple[str, ...]) -> Activations:
    record, entry = run.recorded()
    kept: dict[str, Sizes] = {}
    for call in record.calls:
        kept.setdefault(call.name, {}).update(_sizes(call, call.name == "rms_norm", layout))
    whole_layer, whole_entry = layer, entry
    if layout.sequence_parallel and layout.tp > 1:  # both residual streams and what the norms keep inside are slices
        inside = sum(sum(_inner(call).values()) for call in record.calls if call.name == "rms_norm")
        whole_layer -= (2 * entry + inside) * (layout.tp - 1) // layout.tp
        whole_entry = entry // layout.tp
    return Activations(one - layer, whole_layer, whole_entry, kept, run.flops, notes)


def _sizes(call: Call, hidden: bool, layout: Layout) -> Sizes:
    storages = [output.value.untyped_storage() for output in call.outputs if isinstance(output, Output)]
    sizes = _inner(call) | {storage._cdata: storage.nbytes() for storage in storages}
    ways = layout.tp if hidden and layout.sequence_parallel else 1
    return {key: size // ways for key, size in sizes.items()}


def _inner(call: Call) -> Sizes:
    return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in call.inner}


@dataclass
class _Run:
    """Forward passes of a decoder of ``layers`` layers on fake tensors."""

    config: ModelConfig
    layers: int
    shape: tuple[int, int]
    dtype: str
    segments: bool
    chunked_loss: bool
    flops: dict[str, int] = field(default_factory=dict)

    def plain(self) -> int:
        """Bytes that autograd keeps, parameters and the batch left out."""
        sizes: Sizes = {}
        alive: list[Tensor] = []  # an address is a storage's name only as long as it lives

        def pack(tensor: Tensor) -> Tensor:
            alive.append(tensor.detach())
            sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor.detach()

        with FakeTensorMode(allow_non_fake_inputs=True):  # the site of a dropout is real
            model, batch = self._build()
            own = {t.untyped_storage()._cdata for t in [*model.parameters(), *batch.values()]}
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = self._loss(model, batch)
        del loss
        return sum(size for key, size in sizes.items() if key not in own)

    def recorded(self) -> tuple[Record, int]:
        """The record of the first layer with every op kept, and the bytes of its input; fills ``flops``."""
        from accelbridge.memory.recompute import kept

        record = Record(note_inner=True)
        entry: list[int] = []
        with FakeTensorMode(allow_non_fake_inputs=True):  # the site of a dropout is real
            model, batch = self._build()
            layer = model.layers[0]
            forward = layer.forward

            def recorded(x: Tensor, *rest: Any) -> Tensor:
                entry.append(x.untyped_storage().nbytes())
                with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t), record.recording():
                    return forward(x, *rest)

            layer.forward = recorded
            before = ops.bound()
            try:
                ops.bind({name: kept(name, self._counted(name, op, record)) for name, op in before.items()})
                self._loss(model, batch)
            finally:
                ops.bind(before)
        return record, entry[0]

    def _counted(self, name: str, op: Callable[..., Any], record: Record) -> Callable[..., Any]:
        @wraps(op)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = op(*args, **kwargs)
            if record.calls and record.calls[-1].name == name and not record.calls[-1].outputs:  # inside the layer
                self.flops[name] = self.flops.get(name, 0) + _flops(name, args, result)
            return result

        return call

    def _build(self) -> tuple[Decoder, dict[str, Tensor]]:
        with unset_fake_temporarily(), torch.device("meta"):
            model = Decoder(self.config.model_copy(update={"layers": self.layers}))
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                own = torch.empty(parameter.shape, dtype=getattr(torch, self.dtype))
                module.register_parameter(name, nn.Parameter(own))
        tokens = torch.zeros(self.shape, dtype=torch.int64)
        batch = {"tokens": tokens, "targets": torch.zeros_like(tokens)}
        return model, batch | ({"segments": torch.zeros_like(tokens)} if self.segments else {})

    def _loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        with ops.dropout_stream(torch.zeros(self.shape[0], dtype=torch.int32)):
            if self.chunked_loss:
                return model(batch["tokens"], batch.get("segments"), batch["targets"])
            logits_BSV = model(batch["tokens"], batch.get("segments"))
        return ops.cross_entropy(logits_BSV.flatten(0, -2), batch["targets"].flatten(), -100)


def _flops(name: str, args: tuple[Any, ...], result: Any) -> int:
    """Products by their shapes (every pair of tokens for attention), anything else by the size of its result."""
    if name == "linear":
        return 2 * args[0].numel() * args[1].shape[0]
    if name == "attention":
        q_BHSD, k_BGSD = args[:2]
        return 4 * q_BHSD.numel() * k_BGSD.shape[2]
    return FLOPS_PER_ELEMENT * result.numel()


# ----------------------------------------------------------------------------- implementations on fake tensors


def _usable(run: _Run, loaders: Loaders) -> tuple[dict[str, Callable[..., Any]], tuple[str, ...]]:
    """The chosen implementations, each tried alone on fake tensors; stand-ins for those that fail."""
    table: dict[str, Callable[..., Any]] = {}
    notes: list[str] = []
    for name in ops.NAMES:
        if name not in loaders:
            continue
        try:
            implementation = loaders[name]()
            with _bound({name: implementation}):
                run.plain()
            table[name] = implementation
        except Exception as error:  # a vendor's kernel may raise anything where it is given host tensors
            stand_in = _fused_attention if name == "attention" else ops.reference(name)
            table[name] = stand_in
            why = (str(error).splitlines() or [""])[0][:80]
            notes.append(f"{name} measured by a stand-in, as its own kernel has no shapes to tell: {why}")
    return table, tuple(notes)


@contextmanager
def _bound(table: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    before = ops.bound()
    ops.reset()
    ops.bind(table)
    try:
        yield
    finally:
        ops.bind(before)


def _fused_attention(q_BHSD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, mask: Mask, **_: Any) -> Tensor:
    """Keeps what fused kernels keep: q, k, v, the result and one number per query and head."""
    return F.scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=mask.causal, enable_gqa=True)
