"""What the fp8 kernels serve, for the capabilities of a backend that ships tiles for them. No torch, no triton."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from accelbridge.backend import Limit, Support, unsupported
from accelbridge.kernels import available
from accelbridge.kernels.tiles import Tile
from accelbridge.portable.fp8_cells import EMULATED

_SIXTEEN = (Limit("k", multiple=16), Limit("n", multiple=16))
"""Loads and stores of 16 bytes."""


@dataclass(frozen=True)
class Fp8Kernels:
    """The kernels on one chip with one software stack."""

    tiles: Mapping[str, Tile]
    lacking: Mapping[str, str]
    software: Mapping[str, str]

    def product(self, scaling: str) -> Support:
        """Of operands scaled as ``scaling`` says, without its "_pow2"; any two formats of the chip's family."""
        return self._support(
            product_tile(scaling), (Limit("k", multiple=32), _SIXTEEN[1]) if scaling == "mx" else _SIXTEEN
        )

    def quantize(self) -> Support:
        """Of any format of the chip's family, by any scaling."""
        return self._support("quantize_tensor", ())

    def _support(self, tile: str, limits: tuple[Limit, ...]) -> Support:
        if tile not in self.tiles:
            return unsupported(self.lacking.get(tile, "no tile is shipped for this chip"))
        there = available(self.software)
        return Support("full", limits=limits) if there else there


def product_tile(scaling: str) -> str:
    """The tile of the kernel that multiplies operands scaled so."""
    if scaling == "mx":
        return "scaled_mm.mx"
    return "scaled_mm.blocks" if "block" in scaling else "scaled_mm.whole"


def served(library: Support, kernel: Support) -> Support:
    """A cell of the capability table: the library's where it is full, else the kernel's, each with the other's reason
    for not being it."""
    if library.level == "full":
        return library
    why = library.reason.removesuffix(f"; {EMULATED.reason}")
    if kernel:
        return replace(kernel, reason=f"{why}; served by a kernel of accelbridge")
    return replace(library, reason=f"{why}; accelbridge's kernel: {kernel.reason}; {EMULATED.reason}")
