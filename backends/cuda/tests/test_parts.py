"""The device, the collectives and the profiles of the CUDA backend, as far as they show themselves without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError

from accelbridge.backend import World
from accelbridge.errors import ConfigError
from accelbridge.portable import recorded_collectives
from accelbridge.portable.lowerings import select
from accelbridge.portable.process_group import devices_of
from accelbridge_cuda.backend import CudaBackend
from accelbridge_cuda.collectives import LOWERINGS, CudaCollectives
from accelbridge_cuda.device import CudaDevice
from accelbridge_cuda.options import CudaOptions
from accelbridge_cuda.profiles import PROFILES

TWO_HOSTS = World(size=16, local_size=8)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE", raising=False)


def test_precision_flags_exist_in_this_torch_and_are_set() -> None:
    cublas, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = cublas.fp32_precision, cublas.allow_bf16_reduced_precision_reduction
    try:
        cublas.fp32_precision = "tf32"
        CudaDevice()._set_flags()
        assert (cublas.fp32_precision, cublas.allow_tf32) == ("ieee", False)
        assert cublas.allow_bf16_reduced_precision_reduction is False
        assert cublas.allow_fp16_reduced_precision_reduction is False
        assert cudnn.conv.fp32_precision == "ieee"  # pyright: ignore[reportAttributeAccessIssue]
    finally:
        cublas.fp32_precision, cublas.allow_bf16_reduced_precision_reduction = before
        cublas.allow_fp16_reduced_precision_reduction = True


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("CUDA error: out of memory\nCUDA kernel errors might be", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("NCCL error: Cuda failure 2 'out of memory'", True),
        ("CUDA error: CUDA-capable device(s) is/are busy or unavailable", False),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_texts_of_an_exhausted_memory(text: str, full: bool) -> None:
    assert CudaDevice().is_out_of_memory(RuntimeError(text)) is full


def test_groups_are_native_unless_asked_otherwise() -> None:
    plain = CudaCollectives()
    assert (plain.library, list(plain.lowerings())) == ("nccl", [])
    assert devices_of(plain._backend) == {"cpu": "gloo", "cuda": "nccl"}
    asked = CudaCollectives(CudaOptions(lowerings=["float32_reduce", "fp8_bytes", "float32_reduce"]))
    assert [lowering.name for lowering in asked.lowerings()] == ["float32_reduce", "fp8_bytes"]
    assert select(list(LOWERINGS.values()))  # code for each of them exists
    with pytest.raises(ValidationError):
        CudaOptions.model_validate({"lowerings": ["nothing"]})


@pytest.mark.parametrize(
    ("version", "nccl", "want"),
    [
        ("2.13.0+cu130", "auto", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
        ("2.13.0", "legacy", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}),
        ("2.14.1", "nccl2", {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_DIST_USE_NCCL2": "1"}),
        ("2.15.0", "legacy", {"TORCH_FR_DUMP_ON_TIMEOUT": "1", "TORCH_DIST_USE_NCCL2": "0"}),
        ("2.15.0", "auto", {"TORCH_FR_DUMP_ON_TIMEOUT": "1"}),
    ],
)
def test_the_environment_follows_torchs_version(version: str, nccl: Any, want: dict[str, str]) -> None:
    found = CudaCollectives(CudaOptions(nccl=nccl), version).environment(TWO_HOSTS)
    assert found == {"TORCH_FR_BUFFER_SIZE": "2000", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", **want}


def test_the_recorders_older_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    assert "TORCH_FR_BUFFER_SIZE" not in CudaCollectives().environment(TWO_HOSTS)


def test_one_host_stays_on_its_loopback_interface() -> None:
    assert CudaCollectives().environment(World(size=8, local_size=8))["GLOO_SOCKET_IFNAME"] == "lo"


def test_an_nccl2_that_torch_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nccl2 asked; torch 2\.13\.0 has none, 2\.14 is the first"):
        CudaCollectives(CudaOptions(nccl="nccl2"), "2.13.0")
    assert CudaCollectives(CudaOptions(nccl="nccl2"), "2.14.0").library == "nccl2"


def test_collectives_are_those_of_the_assumed_torch() -> None:
    assumed = CudaBackend(CudaOptions(nccl="nccl2"))
    assumed.host = CudaBackend.assume("h100", 8, {"torch": "2.14.0"})
    assert assumed.collectives.library == "nccl2"


@pytest.mark.parametrize(("check", "lowerings"), [(False, []), (True, []), (False, ["fp8_bytes"])])
def test_the_bound_device_is_passed_to_native_groups(
    monkeypatch: pytest.MonkeyPatch, check: bool, lowerings: list[Any]
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: seen.update(more, backend=backend))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    CudaCollectives(CudaOptions(lowerings=lowerings)).init(dist.HashStore(), World(), 60.0, check)
    native = not check and not lowerings
    assert seen.get("device_id") == (torch.device("cuda", 5) if native else None)
    assert (seen["backend"] == "cpu:gloo,cuda:nccl") is native
    assert seen["timeout"].total_seconds() == 60 + recorded_collectives.SPARE_S  # ours names the ranks first


def test_the_recorder_is_read_by_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(recorded_collectives, "read", lambda names: asked.append(names) or [{"op": "all_reduce"}])
    assert CudaCollectives().trace() == [{"op": "all_reduce"}]
    assert asked == [("_dump_nccl_trace", "_dump_fr_trace")]


def test_profiles_are_data_with_sources_and_leave_the_environment_alone() -> None:
    assert set(PROFILES) >= {"single-node", "infiniband", "roce", "efa", "slingshot", "nvl72"}
    ours = set(CudaCollectives(CudaOptions(nccl="legacy"), "2.15.0").environment(World()))
    for name, profile in PROFILES.items():
        assert profile.source, name
        assert profile.variables, name
        assert not ours & profile.variables.keys(), name  # neither would know which of the two wins
        # NCCL's documentation: they cost correctness or speed elsewhere, and belong to no set-up that stays.
        assert not {"NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS"} & profile.variables.keys(), name
    assert CudaCollectives().profiles() is PROFILES
