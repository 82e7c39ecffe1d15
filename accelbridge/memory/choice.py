"""Which recomputation a run gets: decided before anything starts, shown in the plan, part of its contract.

Imports torch only where a budget must be measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from accelbridge.backend import Request
from accelbridge.errors import ConfigError, did_you_mean
from accelbridge.memory.config import RecomputeSetting, Selective

DEFAULT = ("rms_norm", "rope", "swiglu", "dropout")
"""What ``memory.recompute: selective`` recomputes, as far as the model calls it: cheap ops with large outputs."""
OUTSIDE = frozenset({"embedding", "cross_entropy", "linear_cross_entropy", "adamw"})
"""Ops that run outside the shard units of a decoder, so that recomputing units never reaches them."""


@dataclass(frozen=True)
class Recompute:
    """What is computed a second time in the backward pass instead of being kept."""

    kind: Literal["none", "selective", "full"] = "none"
    ops: tuple[str, ...] = ()
    """Semantic ops that are recomputed, where ``kind`` is selective; the outputs of all others are kept."""
    units: int | None = None
    """The first so many shard units, whose activations wait longest; None: every one."""
    note: str = ""
    """One line for the plan."""

    def as_dict(self) -> dict[str, Any]:
        """What all ranks must agree on."""
        settled = asdict(self) | {"ops": list(self.ops)}
        del settled["note"]
        return settled


def listed(setting: RecomputeSetting, requests: Sequence[Request]) -> Recompute:
    """The recomputation that ``setting`` names, for a decoder that asks for ``requests``; not for a budget.

    Raises ConfigError for an op that doesn't exist or that no shard unit calls.
    """
    used = [request.op for request in requests if request.op not in OUTSIDE]
    if isinstance(setting, Selective):
        assert setting.ops is not None, "a budget is chosen by accelbridge.memory.budget"
        return _selective(_checked(setting.ops, used), f"what {_these(setting.ops, used)} put out is kept")
    if setting == "selective":
        ops = [op for op in DEFAULT if op in used]
        return _selective(ops, f"what {_these(ops, used)} put out is kept")
    return _whole(setting)


def listed_for_any(setting: RecomputeSetting, known: Sequence[str]) -> Recompute:
    """The same for a script's own model, of which it is not known what it calls; ``known`` are all semantic ops.

    Raises ConfigError for an op that doesn't exist, and for a budget.
    """
    if isinstance(setting, Selective) and setting.ops is None:
        raise ConfigError(
            "memory.recompute.budget asked; what a model of your own keeps is known only once it has run on its data; "
            "set memory.recompute to none, selective, full or a list of ops"
        )
    if setting in ("none", "full"):
        return _whole("full" if setting == "full" else "none")
    ops = (
        _checked(setting.ops or [], known) if isinstance(setting, Selective) else [op for op in DEFAULT if op in known]
    )
    return _selective(ops, "only what other ops of accelbridge.ops put out is kept, the rest of the model recomputed")


def needs_units(what: str) -> ConfigError:
    """The error of a setting that works on shard units, for a model that has none."""
    return ConfigError(
        f"{what} asked, which works on shard units; the model has none; put its layers into an nn.ModuleList, or "
        f"define sharding_spec() on it, or leave {what} out"
    )


def _whole(kind: Literal["none", "full"]) -> Recompute:
    return Recompute(kind, note="recompute: every shard unit in full" if kind == "full" else "")


def _selective(ops: Sequence[str], kept: str) -> Recompute:
    return Recompute("selective", tuple(ops), note=f"recompute: selective {', '.join(ops)}; {kept}")


def _these(ops: Sequence[str], used: Sequence[str]) -> str:
    return ", ".join(op for op in used if op not in ops) or "no op"


def _checked(ops: Sequence[str], known: Sequence[str]) -> list[str]:
    for op in ops:
        if op in OUTSIDE and op not in known:
            raise ConfigError(
                f'memory.recompute.ops names "{op}"; it runs outside the shard units, which are what is recomputed; '
                f"ops inside them: {', '.join(known)}; remove it"
            )
        if op not in known:
            raise ConfigError(
                f'memory.recompute.ops names "{op}"; the shard units of this model call no such op'
                f"{did_you_mean(op, list(known))}; choose from {', '.join(known)}"
            )
    return sorted(set(ops), key=list(known).index)
