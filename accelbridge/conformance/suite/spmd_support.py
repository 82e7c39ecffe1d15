"""What tests under the spmd execution model share: all devices of the process in one layout, and what is on them."""

# torch.distributed re-exports without saying so.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelbridge.backend import Execution, Precision
from accelbridge.conformance.bench import Bench, TooSmall
from accelbridge.conformance.suite.trainer_support import devices
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import ShardingSpec

Results = Mapping[str, tuple[Tensor, Tensor]]
"""Name -> what the devices made, and what it must be."""


@dataclass(frozen=True)
class Mesh:
    """All devices of this process, in one layout."""

    t: Bench
    execution: Execution
    size: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of rows: as many as devices, several each, fewer, and such as do not divide."""
        return (self.size, 3 * self.size, 1, self.size + 1, 2 * self.size - 1)

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32, name: str = "", low: int = -8) -> Tensor:
        """Host tensor of small integers, of which any 32 rows add up without rounding, in whatever order."""
        return self.t.integers(*shape, low=low, high=8, name=f"{name}/{shape}/{dtype}", dtype=dtype)

    def split(self, rows: Tensor) -> Tensor:
        """``rows`` on the devices, each of which holds some."""
        return self.execution.place({"rows": rows})["rows"]

    def model(self, weight: Tensor) -> nn.Module:
        """:class:`Weighted`, with its parameter where the layout wants it."""
        return self.execution.realise(Weighted(weight), ShardingSpec(), Precision(), _no_values)

    def gradient(self, model: nn.Module, rows: Tensor) -> Tensor:
        """Of the sum of what :meth:`model` makes of ``rows``: the sum of these, cut up as the parameter is."""
        model(self.split(rows)).sum().backward()
        (parameter,) = model.parameters()
        assert parameter.grad is not None
        return parameter.grad

    def equal(self, results: Results) -> None:
        """Run what was queued, in one graph where the device makes one, and compare."""
        self.execution.end_step()
        for name, (got, want) in results.items():
            self.t.equal(got, want, name=name)


class Weighted(nn.Module):
    """Every row times all elements of a parameter, which it reads as an attribute: where execution gathers it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.reshape(-1)


def _no_values(name: str, shape: tuple[int, ...], rows: range) -> Tensor:
    raise AssertionError(f"{name} has its values already")


@contextmanager
def mesh(t: Bench, layout: Layout | None = None, at_least: int = 2) -> Iterator[Mesh]:
    """All devices in ``layout`` (default: all of them share the rows, and the parameters). What is raised inside is the
    backend's failure: under spmd plain operations of torch are what is tested."""
    count = devices(t)
    if count < at_least:
        raise TooSmall(f"{at_least} devices needed, {count} found")
    execution = t.backend.execution
    with t.must_not_raise():
        execution.start(dist.HashStore(), t.world, layout or Layout(dp_shard=count), 60.0, False)
        try:
            yield Mesh(t, execution, count)
        finally:
            execution.close()
