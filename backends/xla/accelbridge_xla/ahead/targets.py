"""Machines that libtpu compiles for: ``tpu:CHIP:TOPOLOGY``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

from accelbridge.errors import ConfigError, did_you_mean

WORD = "tpu"


@dataclass(frozen=True)
class Target:
    """A chip whose slices can be compiled for."""

    chip: str
    """As ``hardware.GENERATIONS`` names it."""
    dims: int
    """Of its torus: topologies are "4x4" or "4x4x4"."""
    most: int
    """Chips of the largest slice (docs.cloud.google.com/tpu/docs, the page of each generation)."""
    memory_bytes: int
    """What libtpu 0.0.42.1 leaves to a program, by its refusal of one that is too large ("available HBM")."""


GIB = 2**30
TARGETS = {
    "v5e": Target("TPU v5e", 2, 256, int(15.75 * GIB)),
    "v5p": Target("TPU v5p", 3, 8960, int(95.74 * GIB)),
    "v6e": Target("TPU v6e", 2, 256, int(31.25 * GIB)),
}


def parse(chip: str, topology: str) -> tuple[Target, int]:
    """The chip, and the number of chips of the slice. Raises ConfigError; whether libtpu lays hosts out in such a slice
    is known when it is asked."""
    target = TARGETS.get(chip.lower())
    if target is None:
        raise ConfigError(
            f'--compile-for {WORD}:{chip}:{topology} asked; chip "{chip}" is not one of {", ".join(TARGETS)}'
            f"{did_you_mean(chip.lower(), list(TARGETS))}; choose one of them"
        )
    example = "x".join("4" * target.dims)
    if not re.fullmatch(r"[1-9][0-9]{0,3}" + r"x[1-9][0-9]{0,3}" * (target.dims - 1), topology, re.ASCII):
        raise ConfigError(
            f"--compile-for {WORD}:{chip}:{topology} asked; {target.chip} has slices of {target.dims} dimensions, and "
            f'"{topology}" is not one; write it like {example}'
        )
    count = prod(map(int, topology.split("x")))
    if count > target.most:
        raise ConfigError(
            f"--compile-for {WORD}:{chip}:{topology} asked, {count} chips; the largest slice of {target.chip} has "
            f"{target.most}; choose a smaller one"
        )
    return target, count
