"""What the plan cannot vouch for in a model that isn't written on ``accelbridge.ops``."""

from __future__ import annotations

from torch import nn


def coverage_notes(model: nn.Module) -> list[str]:
    """Notes for the plan: modules that run as plain torch, and random ones whose values depend on the layout."""
    leaves = [module for module in model.modules() if not list(module.children())]
    plain = sorted({type(m).__name__ for m in leaves if type(m).__module__.startswith("torch.nn")})
    dropouts = sorted({type(m).__name__ for m in leaves if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0})
    notes = []
    if plain:
        notes.append(f"outside the plan, as plain torch modules: {', '.join(plain)}")
    if dropouts:
        notes.append(f"{', '.join(dropouts)} draws from the rank's own generator: its masks depend on the layout")
    return notes
