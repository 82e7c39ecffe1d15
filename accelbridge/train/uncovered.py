"""What the plan cannot vouch for in a model that isn't written on ``accelbridge.ops``."""

from __future__ import annotations

from torch import nn

from accelbridge.errors import ConfigError


def random_modules(model: nn.Module) -> list[str]:
    """Classes of modules that draw from the rank's generators in training."""
    found = (m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0)
    return sorted({type(module).__name__ for module in found})


def coverage_notes(model: nn.Module) -> list[str]:
    """Notes for the plan: modules that run as plain torch, and random ones whose values depend on the layout."""
    leaves = [module for module in model.modules() if not list(module.children())]
    plain = sorted({type(m).__name__ for m in leaves if type(m).__module__.startswith("torch.nn")})
    dropouts = random_modules(model)
    notes = []
    if plain:
        notes.append(f"outside the plan, as plain torch modules: {', '.join(plain)}")
    if dropouts:
        notes.append(
            f"{', '.join(dropouts)} draws from the rank's own generator: its masks depend on the layout; those of "
            "accelbridge.models.Dropout don't"
        )
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats for m in leaves):
        notes.append("batch norm keeps running statistics per rank: they differ, and a checkpoint holds one rank's")
    if not model.training:
        notes.append("the model was handed over in eval mode: it trains as such")
    return notes


def check_savable(model: nn.Module) -> None:
    """Refuse state that no checkpoint could hold. Raises ConfigError naming the module."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ConfigError(
                f"a model whose {name or 'root'} ({type(module).__name__}) has get_extra_state(); checkpoints hold "
                "tensors only; keep that state in a buffer"
            )
