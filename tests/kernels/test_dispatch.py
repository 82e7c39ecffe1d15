"""Which kernels a backend's products really take, interpreted; compilers see through them, and shards know theirs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accelbridge.backend import Backend
from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.precision.formats import FORMATS
from accelbridge_cuda.backend import CudaBackend
from accelbridge_rocm.backend import RocmBackend

REFERENCE = EmulatedFp8("test")


class Launches(TorchDispatchMode):
    """Names of our custom ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "accelbridge":
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


def backend_of(kind: type[Backend], chip: str, software: dict[str, str] | None = None) -> Backend:
    backend = kind()
    backend.host = kind.assume(chip, 1, software or {})
    return backend


CHIPS = [(CudaBackend, "b200", "float8_e4m3fn"), (CudaBackend, "rtx5090", "float8_e4m3fn"),
         (RocmBackend, "mi300x", "float8_e4m3fnuz"), (RocmBackend, "mi355x", "float8_e4m3fn")]  # fmt: skip


@pytest.mark.parametrize(("kind", "chip", "format"), CHIPS, ids=lambda x: x if isinstance(x, str) else "")
def test_blocks_are_a_kernels_where_the_library_has_none(kind: type[Backend], chip: str, format: str) -> None:
    matmul = backend_of(kind, chip).matmul
    x, w = torch.randn(40, 256), torch.randn(48, 256)
    with Launches() as launches:
        a, b = matmul.quantize(x, FORMATS[format], "block1x128"), matmul.quantize(w, FORMATS[format], "block128x128")
        found = matmul.scaled_mm(a, b.t(), torch.float32)
    assert launches.seen == ["quantize", "quantize", "scaled_mm"]
    torch.testing.assert_close(found, REFERENCE.scaled_mm(a, b.t(), torch.float32), rtol=1e-5, atol=1e-4)
    row = kind.capabilities(kind.chips[chip], backend_of(kind, chip).host.software).support(
        "scaled_mm", format, "block1x128"
    )
    assert row.level == "full"


def test_what_has_no_kernel_is_emulated() -> None:
    a100 = backend_of(CudaBackend, "a100").matmul
    old = backend_of(CudaBackend, "b200", {"triton": "3.3.0"}).matmul
    for matmul in (a100, old):
        with Launches() as launches:
            a = matmul.quantize(torch.randn(16, 128), FORMATS["float8_e4m3fn"], "block1x128")
            matmul.scaled_mm(a, a.t(), torch.float32)
        assert launches.seen == []


def test_a_scale_that_is_given_is_used() -> None:
    matmul = backend_of(CudaBackend, "h100").matmul
    x, scale = torch.randn(20, 64), torch.full((1, 1), 0.25)
    with Launches() as launches:
        found = matmul.quantize(x, FORMATS["float8_e4m3fn"], "tensor", scale)
    assert launches.seen == ["quantize_by"]
    assert torch.equal(
        found.codes("float8_e4m3fn"),
        REFERENCE.quantize(x, FORMATS["float8_e4m3fn"], "tensor", scale).codes("float8_e4m3fn"),
    )


@pytest.mark.parametrize("scalings", [("row", "row"), ("block1x128", "block128x128")], ids=str)
def test_a_compiler_sees_one_graph(scalings: tuple[str, str]) -> None:
    matmul = backend_of(CudaBackend, "rtx5090").matmul
    format = FORMATS["float8_e4m3fn"]

    def product(x: Tensor, w: Tensor) -> Tensor:
        a, b = matmul.quantize(x * 2, format, scalings[0]), matmul.quantize(w, format, scalings[1])
        return matmul.scaled_mm(a, b.t(), torch.float32) + 1

    x, w = torch.randn(24, 128), torch.randn(32, 128)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, w), product(x, w))


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Rank 0 of two, of whom the other is not there: what is asked must need no communication."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_shards_of_rows_stay_where_they_are(two_ranks: None) -> None:
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    from accelbridge.kernels import tiles
    from accelbridge_cuda.tiles import tiles as shipped

    tiles.bind(shipped("sm100"))
    from accelbridge.kernels import quantize, scaled_mm  # noqa: F401

    mesh = init_device_mesh("cpu", (2,))
    local = torch.randn(16, 256)
    whole = DTensor.from_local(local, mesh, [Shard(0)])
    for scaling in ("row", "block1x128", "mx_pow2"):
        codes, scale = torch.ops.accelbridge.quantize(whole, "float8_e4m3fn", 448.0, scaling)
        assert codes.placements == scale.placements == (Shard(0),)
        wanted = REFERENCE.quantize(local, FORMATS["float8_e4m3fn"], scaling)
        assert torch.equal(codes.to_local(), wanted.codes("float8_e4m3fn"))
        assert torch.equal(scale.to_local(), wanted.scale)
    b = REFERENCE.quantize(torch.randn(32, 256), FORMATS["float8_e4m3fn"], "row")
    a = REFERENCE.quantize(local, FORMATS["float8_e4m3fn"], "row")
    sharded = [DTensor.from_local(x, mesh, [Shard(0)]) for x in (a.codes("float8_e4m3fn"), a.scale)]
    whole_b = [DTensor.from_local(x, mesh) for x in (b.codes("float8_e4m3fn"), b.scale)]
    asked = ("float8_e4m3fn", "float8_e4m3fn", [1, -1], [1, -1], torch.float32)
    out = torch.ops.accelbridge.scaled_mm(sharded[0], whole_b[0], sharded[1], whole_b[1], None, *asked)
    assert out.placements == (Shard(0),)
    torch.testing.assert_close(out.to_local(), REFERENCE.scaled_mm(a, b.t(), torch.float32))
