"""From two runs to the cells of a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from tests.parity.envelope import Envelope
from tests.parity.measure import Run, Tensors, relative, whole_norm
from tests.parity.rows import CANCELLED, ENVELOPE, FORCED, GRADIENT, LOSS, Row


@dataclass(frozen=True)
class Cells:
    """One row's figures, None where they are not measured; see the package's text."""

    loss: float | None = None
    norm: float | None = None
    gradient: float | None = None
    rounding: float | None = None
    """Where gradients differ by more than their bound: by how many envelopes of permuted reduction orders at most."""
    free_norm: float | None = None
    weights: float | None = None
    same: str | None = None
    """What differs after a resume on the same layout; "" for nothing."""
    moved: float | None = None
    twin: str | None = None
    """What differs from the twin on the CPU; "" for nothing."""

    def faults(self, loss: float = LOSS) -> list[str]:
        """The names of the cells outside their bounds; NaN is outside. Gradients may differ by more than their bound
        where the order of sums alone makes them."""
        bounds = {"loss": loss, "norm": GRADIENT, "gradient": GRADIENT, "free_norm": ENVELOPE, "weights": ENVELOPE}
        if self.rounding is not None and self.rounding <= ENVELOPE:
            del bounds["gradient"]
        figures = {name: (getattr(self, name), bound) for name, bound in {**bounds, "moved": loss}.items()}
        found = [name for name, (figure, bound) in figures.items() if figure is not None and not figure <= bound]
        return found + [name for name in ("same", "twin") if getattr(self, name)]


def compare(row: Row, runs: Mapping[str, Run], envelopes: Mapping[str, Envelope]) -> Cells:
    """The cells of ``row`` by the runs of all rows."""
    run = runs[row.name]
    twin = _twin(run, runs[row.twin]) if row.twin else None
    if row.torch_dropout:  # its masks are its own: there is no reference
        return Cells(same=run.same, twin=twin)
    reference, bounds = runs[row.reference], envelopes[row.reference]
    assert run.weights.keys() == reference.weights.keys()
    steps = run.forced_gradients.keys()
    forced = {s: _gradients(run.forced_gradients[s], reference.forced_gradients[s]) for s in steps}
    apart = [(figure, bounds.gradients[s][name]) for s in steps for name, figure in forced[s].items()]
    beyond = [figure / envelope for figure, envelope in apart if not figure <= GRADIENT]
    return Cells(
        loss=_largest(run.losses, reference.losses),
        norm=_largest(run.forced_norms, reference.forced_norms) if forced else None,
        gradient=_most(figure for figure, _ in apart) if forced else None,
        rounding=_most(beyond) if beyond else None,
        free_norm=_most(abs(run.norms[s] / n - 1) / bounds.norms[s] for s, n in reference.norms.items()),
        weights=_most(relative(run.weights[n], t) / bounds.weights[n] for n, t in reference.weights.items()),
        same=run.same,
        moved=_largest(run.moved_losses, reference.losses) if run.moved_losses else None,
        twin=twin,
    )


def _gradients(ours: Tensors, theirs: Tensors) -> dict[str, float]:
    """By how much each tensor differs, relative to it, or to a thousandth of the whole gradient where that is more:
    what is left of terms that cancel has fewer digits than they have."""
    assert ours.keys() == theirs.keys()
    floor = CANCELLED * whole_norm(theirs)
    return {name: relative(ours[name], tensor, floor) for name, tensor in theirs.items()}


def _largest(ours: Mapping[int, float], reference: Mapping[int, float]) -> float:
    """The largest relative difference."""
    return _most(abs(value / reference[step] - 1) for step, value in ours.items())


def _most(figures: Iterable[float]) -> float:
    """The largest; NaN if any is, which Python's own ``max`` may pass over."""
    return float(torch.tensor(list(figures), dtype=torch.float64).max())


def _twin(ours: Run, theirs: Run) -> str:
    if wrong := [step for step, loss in ours.losses.items() if loss != theirs.losses[step]]:
        return f"loss of step {wrong[0]}"
    for step in FORCED:
        a, b = ours.forced_gradients[step], theirs.forced_gradients[step]
        if wrong := [name for name in b if not torch.equal(a[name], b[name])]:
            return f"gradient of {wrong[0]} after {step} steps"
    return next((name for name, tensor in theirs.weights.items() if not torch.equal(ours.weights[name], tensor)), "")
