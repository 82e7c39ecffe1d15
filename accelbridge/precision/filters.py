"""Which linear layers run in fp8. Works on names and shapes, so that a plan can say it before torch is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from accelbridge.errors import ConfigError
from accelbridge.precision.config import Fp8Config

Shapes = Mapping[str, tuple[int, int]]
"""(out, in) of linear layers by full name, in the model's order."""
_BLOCK = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True)
class Filtered:
    """What runs in fp8, and why the rest does not."""

    chosen: tuple[str, ...]
    left: Mapping[str, str]
    """Name to reason."""

    @property
    def note(self) -> str:
        """One line for the plan."""
        total = len(self.chosen) + len(self.left)
        reasons = dict.fromkeys(self.left.values())
        why = "; ".join(f"{reason}: {_listed([n for n, r in self.left.items() if r == reason])}" for reason in reasons)
        return f"fp8: {len(self.chosen)} of {total} linear layers" + (f"; in bfloat16 stay {why}" if why else "")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def choose(linears: Shapes, config: Fp8Config) -> Filtered:
    """Apply the filters of ``config``. A block is what the first number in a name counts: ``layers.3.ffn.up`` is in
    block 3. Raises ConfigError where nothing is left, or a pattern of the user's own matches nothing."""
    blocks = {name: int(found.group(1)) for name in linears if (found := _BLOCK.search(name))}
    last = max(blocks.values(), default=-1)
    _check_patterns(linears, config)
    if not blocks and (config.skip_first or config.skip_last):
        raise ConfigError(
            "precision.fp8.skip_first or skip_last asked; no linear layer is in a numbered block; they are called "
            f"{_listed(list(linears))}; name them in precision.fp8.exclude"
        )
    chosen: list[str] = []
    left: dict[str, str] = {}
    for name in linears:
        block = blocks.get(name)
        pattern = next((p for p in config.exclude if fnmatchcase(name, p)), None)
        if pattern is not None:
            left[name] = f"excluded by {pattern}"
        elif block is not None and block < config.skip_first:
            left[name] = f"skip_first {config.skip_first}"
        elif block is not None and block > last - config.skip_last:
            left[name] = f"skip_last {config.skip_last}"
        else:
            chosen.append(name)
    if not chosen:
        raise ConfigError(
            f'precision "fp8" asked; of {len(linears)} linear layers the filters leave none; change '
            "precision.fp8.exclude, skip_first or skip_last, or set precision.compute: bfloat16"
        )
    return Filtered(tuple(chosen), left)


def _check_patterns(linears: Shapes, config: Fp8Config) -> None:
    if "exclude" not in config.model_fields_set:
        return
    for pattern in config.exclude:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise ConfigError(
                f'precision.fp8.exclude "{pattern}" asked; no linear layer has such a name; they are called '
                f"{_listed(list(linears))}"
            )
