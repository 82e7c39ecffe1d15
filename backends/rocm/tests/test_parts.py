"""The device, the collectives and the profiles of the ROCm backend, as far as they show themselves without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelbridge.backend import World
from accelbridge.portable.process_group import devices_of
from accelbridge_rocm.collectives import RocmCollectives
from accelbridge_rocm.device import RocmDevice
from accelbridge_rocm.options import RocmOptions
from accelbridge_rocm.profiles import PROFILES

TWO_HOSTS = World(size=16, local_size=8)


def test_precision_flags_exist_in_this_torch() -> None:
    blas = torch.backends.cuda.matmul
    before = blas.fp32_precision, blas.allow_bf16_reduced_precision_reduction
    try:
        blas.fp32_precision = "tf32"
        RocmDevice()._set_flags()
        assert (blas.fp32_precision, blas.allow_bf16_reduced_precision_reduction) == ("ieee", False)
    finally:
        blas.fp32_precision, blas.allow_bf16_reduced_precision_reduction = before
        blas.allow_fp16_reduced_precision_reduction = True


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("HIP out of memory. Tried to allocate 2.00 GiB", True),
        ("HIP error: out of memory", True),
        ("HIP error: invalid device function", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_texts_of_an_exhausted_memory(text: str, full: bool) -> None:
    assert RocmDevice().is_out_of_memory(RuntimeError(text)) is full


def test_groups_are_native_unless_asked_otherwise() -> None:
    plain = RocmCollectives()
    assert (plain.library, list(plain.lowerings())) == ("rccl", [])
    assert devices_of(plain._backend) == {"cpu": "gloo", "cuda": "nccl"}
    asked = RocmCollectives(RocmOptions(lowerings=["fp8_bytes"]))
    assert [lowering.name for lowering in asked.lowerings()] == ["fp8_bytes"]


def test_the_environment_follows_torchs_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NCCL_TRACE_BUFFER_SIZE", raising=False)
    older = RocmCollectives(torch_version="2.13.0+rocm7.1").environment(TWO_HOSTS)
    assert older == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    newer = RocmCollectives(torch_version="2.15.0").environment(World(size=8, local_size=8))
    assert newer == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_ON_TIMEOUT": "1", "GLOO_SOCKET_IFNAME": "lo"}


def test_the_bound_device_is_passed_to_native_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: seen.update(more, backend=backend))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    RocmCollectives().init(dist.HashStore(), World(), 60.0, check=False)
    assert (seen["device_id"], seen["backend"]) == (torch.device("cuda", 5), "cpu:gloo,cuda:nccl")


def test_profiles_are_data_with_sources_and_leave_the_environment_alone() -> None:
    ours = set(RocmCollectives(torch_version="2.15.0").environment(World()))
    for name, profile in PROFILES.items():
        assert profile.source, name
        assert profile.variables, name
        assert not ours & profile.variables.keys(), name
        gone = ("NVLS", "COLLNET", "MSCCL")  # RCCL has none of them
        assert not any(word in variable for word in gone for variable in profile.variables), name
    assert RocmCollectives().profiles() is PROFILES
