"""The guard of a run in fp8: ranks whose scales differ stop the run, and layers that lose much of their numbers are
named before the loss shows it. Nothing is to be set: the thresholds are in ``precision.fp8``."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NoReturn

from accelbridge.checkpoint.together import gathered
from accelbridge.errors import DesynchronisedError
from accelbridge.precision.recipe import ROLES
from accelbridge.precision.state import Desynchronised, Fp8State, Lost
from accelbridge.train.metrics import HALTED_EVENT

if TYPE_CHECKING:
    from accelbridge.train.trainer import Trainer

COUNTERS_EVENT = "fp8"
"""Event of an interval: ``layers``, by name and role [saturated, underflowed, nonfinite], shares of the elements."""
WARNING_EVENT = "fp8_warning"
"""Event of a layer that came above a threshold: ``layer``, ``role``, ``loss``, ``share``; once each."""


class Fp8Guard:
    """Judges what :class:`Fp8State` saw since the last call."""

    def __init__(self, state: Fp8State) -> None:
        self._state = state
        config = state.recipe.config
        self._limits = {
            "saturated": config.warn_saturated,
            "underflowed": config.warn_underflowed,
            "nonfinite": 0.0,
        }
        self._warned: set[tuple[str, str, str]] = set()

    def look(self, trainer: Trainer) -> None:
        """All ranks call this, at each reading of the metrics. Raises DesynchronisedError on all of them."""
        if found := self._state.diverged():
            self._give_up(trainer, found)
        counters = self._state.read_counters(trainer.execution.largest)
        if not counters:
            return
        layers = {
            name: {role: [float(f"{x:.3g}") for x in lost] for role, lost in roles.items()}
            for name, roles in counters.items()
        }
        trainer.metrics.event(COUNTERS_EVENT, step=trainer.step, layers=layers)
        for name, roles in counters.items():
            for role, lost in roles.items():
                self._warn(trainer, name, role, lost)

    def _warn(self, trainer: Trainer, layer: str, role: str, lost: Lost) -> None:
        for kind, limit in self._limits.items():
            share: float = getattr(lost, kind)
            if share <= limit or (layer, role, kind) in self._warned:
                continue
            self._warned.add((layer, role, kind))
            trainer.metrics.event(
                WARNING_EVENT, step=trainer.step, layer=layer, role=role, loss=kind, share=float(f"{share:.3g}")
            )
            trainer.progress.print(
                f"step {trainer.step}: fp8: {share:.3g} of the {role} of {layer} {_HAPPENED[kind]}; {_DO[kind]}"
            )

    def _give_up(self, trainer: Trainer, found: list[Desynchronised]) -> NoReturn:
        first = found[0]
        held = gathered(trainer.execution.control_group, self._state.held(first.layer, first.role))
        usual, _ = Counter(held).most_common(1)[0]
        ranks = [rank for rank, values in enumerate(held) if values != usual]
        message = (
            f"the fp8 scale of the {first.role} of {first.layer} differs between ranks: "
            + ", ".join(f"rank {rank} holds {values[0]:g} (amax {values[1]:g})" for rank, values in enumerate(held))
            + f"; {_who(ranks, len(held))}{_more(found)}; every rank has stopped at step {trainer.step}; look for code "
            "or hardware of that rank that writes to the scaling state, and resume with --resume auto"
        )
        trainer.metrics.event(HALTED_EVENT, step=trainer.step, cause="fp8", message=message)
        raise DesynchronisedError(message)


_HAPPENED = {
    "saturated": "is cut to the format's largest number",
    "underflowed": "becomes 0",
    "nonfinite": "is infinite or not a number",
}
_DO = {
    "saturated": "its scale is too old: set precision.fp8.margin, a shorter history, or scaling: tensor",
    "underflowed": "its range is wider than the format's: set scaling: row, block or mx, or exclude the layer",
    "nonfinite": "see guards.nonfinite",
}


def _who(ranks: list[int], size: int) -> str:
    if size == 2:
        return "two ranks alone do not say which of them is wrong"
    if 2 * len(ranks) >= size:
        return "no more than half of them agree, so they do not say which are wrong"
    return f"the odd one{'s are' if len(ranks) > 1 else ' is'} rank {', '.join(map(str, ranks))}"


def _more(found: list[Desynchronised]) -> str:
    return f"; so do {len(found) - 1} more of {len(ROLES)} per layer" if len(found) > 1 else ""
