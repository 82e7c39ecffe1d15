"""Layout: the degrees of a run's mesh axes. Free of torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh axes, and the ZeRO stage of ``dp_shard``.

    Stage 1 shards optimizer state, 2 also gradients, 3 also parameters. The order of the axes, outermost first,
    is pp, dp_replicate, dp_shard, cp, tp: neighbours in tp are neighbours on the host.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    zero: int = 3
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    ep: int = 1

    @property
    def size(self) -> int:
        """Devices that the layout takes."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_parallel(self) -> int:
        """Ways in which the global batch is split."""
        return self.dp_replicate * self.dp_shard

    def describe(self) -> str:
        """``"dp_shard 2 x tp 2, ZeRO 3, sequence parallel"``; axes of degree 1 are left out."""
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        parts = [f"{axis} {getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        shown = " x ".join(parts) or "1 device"
        shown += f", ZeRO {self.zero}" if self.dp_shard > 1 else ""
        return shown + (", sequence parallel" if self.sequence_parallel else "")

    def as_dict(self) -> dict[str, int | bool]:
        return asdict(self)
