"""What a script brings itself, described for the plan, and the recipe's data as samples."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from accelbridge.data.loader import PackedSamples, Samples, describe_samples
from accelbridge.errors import ConfigError
from accelbridge.models.dropout import Dropout
from accelbridge.parallel.layout import Layout
from accelbridge.precision.convert import linears
from accelbridge.train.build import sharding_spec
from accelbridge.train.config import TrainConfig
from accelbridge.train.loss import Loss, NextTokenLoss
from accelbridge.train.prepare import Prepared
from accelbridge.train.run_plan import Provided
from accelbridge.train.uncovered import check_savable, coverage_notes, random_modules


def packed(prepared: Prepared, split: str) -> Samples | None:
    """The samples of the recipe's token store of ``split``; None without one."""
    store = getattr(prepared, split)
    config = prepared.config
    return PackedSamples(store, config.train.seq_len, config.data.document_mask) if store is not None else None


def provided(
    config: TrainConfig, model: nn.Module | None, own: Mapping[str, Samples | None], loss: Loss | None
) -> Provided:
    """What the plan must know of a script's own data and model: what they are, the ops it is known to call, and
    what is not covered."""
    data = {name: describe_samples(samples) for name, samples in own.items() if samples is not None}
    if loss is not None and config.memory.chunked_loss:
        raise ConfigError(
            "memory.chunked_loss asked, of next-token loss; the loss is your own; let it call "
            "accelbridge.ops.linear_cross_entropy, and leave chunked_loss out"
        )
    if model is None:
        return Provided(data=data, loss=loss is not None)
    parameters = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if config.model is not None:
        raise ConfigError("model asked both in the recipe and as an argument; give one of the two")
    check_savable(model)
    parallel = config.parallel
    spec = sharding_spec(model, Layout(tp=parallel.tp, sequence_parallel=parallel.sequence_parallel))
    notes = coverage_notes(model)
    if loss is not None and parallel.tp > 1:
        notes.append("the loss is your own: what the model returns split over tp is gathered for it")
    if loss is None and (note := NextTokenLoss(model, config.memory.chunked_loss).note):
        notes.append(note)
    vocab_head = "vocab_head" in spec.tensor_parallel.values()
    dropout = any(isinstance(module, Dropout) and module.p > 0 for module in model.modules())
    return Provided(
        model=True,
        data=data,
        loss=loss is not None,
        dropout=dropout,
        random=random_modules(model),
        vocab_head=vocab_head,
        parameters=parameters,
        linears=linears(model),
        units=sum(bool(name) and spec.is_unit(name) for name, _ in model.named_modules()),
        spec=spec,
        notes=notes,
    )
