"""Where a value that is not finite arose: which parameter, which rank, and, by running the step again, which module.

What is certain after the fact differs. A loss that is not finite is known on the rank that computed it. A gradient is
known only after the reduction, which has spread it over the shards of that parameter on all ranks. So the step is run
once more, which is possible as long as no update was made since: batches, dropout masks and parameters are the same,
and what each module puts out, and each gradient that reaches it, is looked at on each rank before anything is reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from accelbridge.checkpoint.together import gathered
from accelbridge.portable.sharded_adamw import local

if TYPE_CHECKING:
    from accelbridge.guards.guards import Kept
    from accelbridge.train.trainer import Trainer

Flags = list[tuple[str, Tensor]]
"""What would be wrong, and a bool scalar on the device that is true where it is not."""
_DATA = "data: "
"""What a rank says of its batch begins with this."""


@dataclass(frozen=True)
class Finding:
    """What all ranks know together of a step that was not finite."""

    loss: float
    """Mean over the whole step."""
    parameter: str | None
    """The first, in the model's order, whose gradient is not finite on any rank; None where all are finite."""
    affected: int
    """How many parameters have such a gradient."""
    ranks: list[int]
    """Ranks whose own share of the loss is not finite."""
    origins: dict[int, str] = field(default_factory=dict)
    """By rank, what was found when the step was run again; only ranks that found something."""
    again: bool = False
    """Whether the step was run again."""

    @property
    def ranks_text(self) -> str:
        """``"1, 3"``; empty if not known."""
        return ", ".join(map(str, self.ranks or sorted(self.origins)))

    @property
    def in_data(self) -> bool:
        """Whether a batch itself held such a value."""
        return any(text.startswith(_DATA) for text in self.origins.values())

    def __str__(self) -> str:
        return ", ".join([self._what(), self._where()])

    def _what(self) -> str:
        lost = self.loss - self.loss != 0
        if self.parameter is None:
            return f"the loss is {self.loss}" if lost else "the norm of all gradients is above what float32 holds"
        more = f" (the first of {self.affected} in the model's order)" if self.affected > 1 else ""
        gradient = f"the gradient of {self.parameter} is not finite{more}"
        return f"the loss is {self.loss} and {gradient}" if lost else f"the loss is finite and {gradient}"

    def _where(self) -> str:
        if self.origins:
            found = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.origins.items()))
            return f"arising on rank {self.ranks_text} (run again, {found})"
        if self.ranks:
            again = "; run again, every module was finite" if self.again else ""
            return f"arising on rank {self.ranks_text}, whose share of the loss is not finite{again}"
        why = "run again, every module was finite on every rank" if self.again else "the reduction mixes all ranks'"
        return f"on which rank is not known: {why}"


def locate(trainer: Trainer, step: int, loss: float, kept: Kept, *, again: bool) -> Finding:
    """What is known of update ``step``, the same on every rank; a collective. ``again``: also by running it once more,
    for which no update may have been made since."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    bad = torch.isfinite(kept.norms).logical_not().tolist()
    mine = (
        bool(torch.isfinite(kept.share)),
        [names[id(p)] for p, not_finite in zip(kept.parameters, bad, strict=True) if not_finite],
        _run_again(trainer, step) if again else "",
    )
    trainer.checkpointer.wait()  # its thread uses the same group
    everyone = gathered(trainer.execution.control_group, mine)
    affected = {name for _, theirs, _ in everyone for name in theirs}
    return Finding(
        loss=loss,
        parameter=next((name for name in names.values() if name in affected), None),
        affected=len(affected),
        ranks=[rank for rank, (finite, _, _) in enumerate(everyone) if not finite],
        origins={rank: text for rank, (_, _, text) in enumerate(everyone) if text},
        again=again,
    )


def _run_again(trainer: Trainer, step: int) -> str:
    """Run forward and backward of update ``step`` (from 1) on the parameters as they are; what is first not finite on
    this rank, or "". Leaves no gradients."""
    model, before = trainer.model, trainer.step
    trainer.step = step - 1
    batches = trainer.loader.step(trainer.position)
    forward: Flags = [
        (f"parameter {name} itself is not finite", _finite(p.detach())) for name, p in model.named_parameters()
    ]
    backward: Flags = []
    try:
        # What is compiled would hide its modules, or be compiled again with their hooks.
        with torch.compiler.set_stance("force_eager"), trainer.uncaptured(), _watched(model, forward, backward):
            share, _ = trainer.accumulate(batches)
    finally:
        trainer.optimizer.zero_grad()
        trainer.execution.end_step()
        trainer.step = before
    if text := next(filter(None, map(_of_data, batches)), ""):
        return text
    of_loss = ("the loss itself is not finite, although all that modules put out is", torch.isfinite(share))
    seen = [*forward, of_loss, *backward]
    finite = torch.stack([flag.reshape(()) for _, flag in seen]).tolist()
    return next((text for (text, _), good in zip(seen, finite, strict=True) if not good), "")


def _of_data(batch: dict[str, Tensor]) -> str:
    """Which sample of a host batch holds a value that is not finite, or ""."""
    for name, tensor in batch.items():
        if tensor.is_floating_point() and not (good := torch.isfinite(tensor)).all():
            row = int(good.flatten(1).all(1).logical_not().nonzero()[0])
            return f"{_DATA}{name} of sample {int(batch['sample_ids'][row])} holds a value that is not finite"
    return ""


@contextmanager
def _watched(model: nn.Module, forward: Flags, backward: Flags) -> Iterator[None]:
    """Note, in the order in which it happens, whether what modules put out is finite, and whether the gradients are
    that reach it. Only flags on the device are kept, and nothing asks which execution model this is."""
    microbatch = 0

    def next_microbatch(*_: Any) -> None:
        nonlocal microbatch
        microbatch += 1

    def noting(name: str) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, output: Any) -> None:
            for tensor in _floating(output):
                where = f"{name or 'the model'} in microbatch {microbatch}"
                forward.append((f"the output of {where} is not finite", _finite(tensor.detach())))
                if tensor.requires_grad:
                    text = f"the gradient of the output of {where} is not finite"
                    tensor.register_hook(lambda g, t=text: backward.append((t, _finite(g))))

        return note

    handles = [model.register_forward_pre_hook(next_microbatch)]
    handles += [module.register_forward_hook(noting(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _finite(tensor: Tensor) -> Tensor:
    return torch.isfinite(local(tensor)).all()


def _floating(output: Any) -> Sequence[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
