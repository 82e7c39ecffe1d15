"""What the backend states of TorchTPU without it: which runtime serves, what it finds, what it claims and refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelbridge.backend import Request, World
from accelbridge.errors import BackendError
from accelbridge_xla import runtimes
from accelbridge_xla.backend import XlaBackend
from accelbridge_xla.eager import attention, host
from accelbridge_xla.eager.backend import TorchTpuBackend
from accelbridge_xla.eager.device import TorchTpuDevice

ASKS = ["numpy>=2", "libtpu>=0.0.50", "torch>=2.11.0,<=2.15.0"]
"""Of the metadata of torch_tpu 0.2.0."""


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(runtimes.VARIABLE, raising=False)
    monkeypatch.delenv(host.LIBRARY_VARIABLE, raising=False)


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """As if these were installed, and no other of what the backend looks for."""
    monkeypatch.setattr(runtimes, "version_of", versions.get)
    monkeypatch.setattr(runtimes, "find_spec", lambda name: object() if name in versions else None)
    monkeypatch.setattr(host, "find_spec", lambda name: object() if name in versions else None)
    monkeypatch.setattr(runtimes, "requires", lambda name: ASKS)


# ------------------------------------------------------------------------------------------------- which runtime


@pytest.mark.parametrize(
    ("versions", "runtime"),
    [
        ({"torch": "2.13.0+cpu"}, "torch_xla"),
        ({"torch": "2.9.1", "torch_xla": "2.9.0"}, "torch_xla"),
        ({"torch": "2.13.0", "torch_tpu": "0.2.0"}, "torch_tpu"),
        # Both: whichever suits the torch beside it.
        ({"torch": "2.13.0+cpu", "torch_tpu": "0.2.0", "torch_xla": "2.9.0"}, "torch_tpu"),
        ({"torch": "2.9.1+cu128", "torch_tpu": "0.2.0", "torch_xla": "2.9.0"}, "torch_xla"),
    ],
)
def test_the_installed_runtime_serves(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], runtime: str) -> None:
    install(monkeypatch, **versions)
    assert runtimes.chosen() == runtime
    assert runtimes.backend() is {"torch_xla": XlaBackend, "torch_tpu": TorchTpuBackend}[runtime]
    assert (runtimes.refusal() is None) == (runtime in versions)


@pytest.mark.parametrize(
    ("versions", "asked", "reason"),
    [
        ({"torch": "2.13.0"}, "", "neither torch_xla nor torch_tpu is installed"),
        (
            {"torch": "2.9.1", "torch_tpu": "0.2.0"},
            "",
            "torch_tpu 0.2.0 is built for torch <=2.15.0,>=2.11.0, and torch 2.9.1 is installed",
        ),
        (
            {"torch": "2.13.0", "torch_xla": "2.9.0"},
            "",
            "torch_xla 2.9.0 is built for torch 2.9, and torch 2.13.0 is installed",
        ),
        (
            {"torch": "2.13.0", "torch_xla": "2.13.0", "torch_tpu": "0.2.0"},
            "",
            "both suit torch 2.13.0; set ACCELBRIDGE_XLA_RUNTIME to one of them",
        ),
        ({"torch": "2.13.0"}, "torch_tpu", "ACCELBRIDGE_XLA_RUNTIME=torch_tpu is set, but torch_tpu is not installed"),
        ({"torch": "2.13.0"}, "jax", "ACCELBRIDGE_XLA_RUNTIME=jax is set; the runtimes are torch_xla and torch_tpu"),
    ],
)
def test_a_runtime_that_cannot_serve_says_why(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], asked: str, reason: str
) -> None:
    install(monkeypatch, **versions)
    if asked:
        monkeypatch.setenv(runtimes.VARIABLE, asked)
    probe = runtimes.backend().probe()
    assert not probe.available
    assert reason in probe.reason


def test_of_two_that_suit_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.13.0", torch_xla="2.13.0", torch_tpu="0.2.0")
    for name in runtimes.RUNTIMES:
        monkeypatch.setenv(runtimes.VARIABLE, name)
        assert (runtimes.chosen(), runtimes.refusal()) == (name, None)


# ------------------------------------------------------------------------------------------------------ detection


def bus(folder: Path, device: str, *, open_to_us: int, functions: int = 4) -> tuple[Path, Path]:
    """A PCI bus with TPUs, and /dev/vfio with the first ``open_to_us`` of them, as Linux shows both."""
    pci, vfio = folder / "pci", folder / "vfio"
    vfio.mkdir()
    for index in range(functions):
        function = pci / f"0000:00:{index:02x}.0"
        function.mkdir(parents=True)
        (function / "vendor").write_text("0x1ae0\n")
        (function / "device").write_text(f"{device}\n")
        (function / "iommu_group").symlink_to(f"../../kernel/iommu_groups/{index}")
        if index < open_to_us:
            (vfio / str(index)).touch()
    return pci, vfio


def test_devices_are_what_is_handed_to_user_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.13.0", torch_tpu="0.2.0", libtpu="0.0.52")
    probe = host.probe(*bus(tmp_path, "0x006f", open_to_us=2))
    assert probe.available
    assert [(device.index, device.chip) for device in probe.devices] == [(0, "TPU v6e"), (1, "TPU v6e")]
    assert all(Path(device.path).is_dir() for device in probe.devices)
    assert probe.facts["runtime"] == "torch_tpu"


def test_an_installed_library_is_not_a_tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.13.0", torch_tpu="0.2.0", libtpu="0.0.52")
    monkeypatch.setenv("PJRT_DEVICE", "CPU")  # torch_xla's way to ask for virtual devices
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    probe = host.probe(tmp_path / "absent", tmp_path)
    assert (probe.available, probe.devices, probe.reason) == (False, (), "no TPU on the PCI bus")


def test_chips_that_are_not_handed_over_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.13.0", torch_tpu="0.2.0", libtpu="0.0.52")
    probe = host.probe(*bus(tmp_path, "0x0063", open_to_us=0))
    assert not probe.available
    assert "4 x TPU on the PCI bus, none of them in" in probe.reason


def test_a_chip_without_libtpu_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, torch="2.13.0", torch_tpu="0.2.0")
    place = bus(tmp_path, "0x0062", open_to_us=4)
    probe = host.probe(*place)
    assert not probe.available
    assert "4 x TPU v5p on the PCI bus, but libtpu is not installed; install" in probe.reason
    library = tmp_path / "libtpu.so"
    library.touch()
    monkeypatch.setenv(host.LIBRARY_VARIABLE, str(library))
    assert host.probe(*place).available


def test_probing_imports_no_sdk() -> None:
    code = (
        "import sys; from accelbridge_xla.eager.backend import TorchTpuBackend as B; p = B.probe(); assert p.reason; "
        "b = B(); b.capabilities('TPU v5e', {}); b.chip(p); "
        "print([m for m in ('torch', 'torch_tpu', 'jax', 'libtpu') if m in sys.modules])"
    )
    path = [str(Path(runtimes.__file__).parents[1]), str(Path(runtimes.__file__).parents[3])]
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# --------------------------------------------------------------------------------------------------------- claims


@pytest.mark.parametrize(
    ("op", "dtype", "variant", "reason"),
    [
        ("reduce", "float32", "sum", "no reduce to one of them"),
        ("all_reduce", "bfloat16", "premul_sum", "'premul_sum' reduction is not supported"),
        ("linear", "float16", "", "no float16"),
    ],
)
def test_what_is_refused_says_why(op: str, dtype: str, variant: str, reason: str) -> None:
    support = TorchTpuBackend.capabilities("TPU v5e", {}).support(op, dtype, variant)
    assert not support
    assert reason in support.reason


JAX = {"jax": "0.10.2"}
CAUSAL = frozenset({"causal"})


@pytest.mark.parametrize(
    ("name", "is_tpu", "software", "shape", "needs", "reason"),
    [
        ("flash", True, {}, {"head_dim": 64, "sequence": 100}, CAUSAL, ""),
        ("flash", True, {}, {"head_dim": 256, "sequence": 100}, CAUSAL, ""),
        ("flash", True, {}, {"head_dim": 192, "sequence": 100}, CAUSAL, "heads below 128, or of a multiple of it"),
        ("flash", True, {}, {"head_dim": 64}, CAUSAL | {"segments"}, "takes no mask tensor"),
        ("flash", False, {}, {"head_dim": 64}, CAUSAL, "which no host can run"),
        ("splash", True, JAX, {"head_dim": 128, "sequence": 1024}, CAUSAL | {"window", "gqa"}, ""),
        ("splash", True, JAX, {"head_dim": 128, "sequence": 384}, CAUSAL, ""),
        ("splash", True, JAX, {"head_dim": 128, "sequence": 640}, CAUSAL, "sequences of a multiple of 512"),
        ("splash", True, JAX, {"head_dim": 64, "sequence": 1024}, CAUSAL, "heads of a multiple of 128"),
        ("splash", True, JAX, {"head_dim": 128, "sequence": 512}, CAUSAL | {"softcap"}, "has no softcap"),
        ("splash", True, {}, {"head_dim": 128, "sequence": 512}, CAUSAL, "needs jax"),
        ("splash", False, JAX, {"head_dim": 128, "sequence": 512}, CAUSAL, "which no host can run"),
    ],
)
def test_attention_kernels_by_their_rules(
    name: str, is_tpu: bool, software: dict[str, str], shape: dict[str, int], needs: frozenset[str], reason: str
) -> None:
    (found,) = [each for each in attention.candidates(is_tpu, software) if each.name == name]
    support = found.supports(Request("attention", "bfloat16", shape, needs=needs))
    assert bool(support) == (not reason)
    assert reason in support.reason


def test_processes_that_share_no_slice_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_TPU_SLICEBUILDER_ADDRESSES", raising=False)
    monkeypatch.setenv("TORCH_TPU_TOPOLOGY", "2,2,1")
    device = TorchTpuDevice(lambda: TorchTpuBackend.assume("v5e", 4, {}))
    with pytest.raises(BackendError, match=r"4 processes on TPUs; found: TORCH_TPU_SLICEBUILDER_ADDRESSES not set"):
        device.bind(World(rank=1, size=4, local_rank=1, local_size=4))
    with pytest.raises(BackendError, match="a device for local rank 4 of 8; found: 4 here"):
        device.bind(World(rank=4, size=8, local_rank=4, local_size=8))


def test_a_plan_can_be_looked_at_anywhere(tmp_path: Path) -> None:
    """On a machine with neither runtime, the one that is named."""
    path = [str(Path(runtimes.__file__).parents[1]), str(Path(runtimes.__file__).parents[3])]
    env = {**os.environ, "PYTHONPATH": ":".join(path), runtimes.VARIABLE: "torch_tpu"}
    asked = ["--assume", "chip=v6e,devices=4,torch=2.13.0,torch_tpu=0.2.0", "--set", "parallel.tp=2"]
    recipe = Path(runtimes.__file__).parents[3] / "recipes" / "demo.yaml"
    command = [sys.executable, "-m", "accelbridge", "explain", str(recipe), "--backend", "xla", *asked]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for part in ("TPU v6e", "torch_tpu 0.2.0", "tpu_dist (TorchTPU)"):
        assert part in done.stdout, done.stdout
