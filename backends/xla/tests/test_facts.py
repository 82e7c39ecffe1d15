"""What the backend states without torch_xla: what it finds, what it claims, where it puts parameters."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from accelbridge.backend import Precision, Request, World
from accelbridge.errors import BackendError, ConfigError, NotSupportedYet
from accelbridge.models.config import ModelConfig
from accelbridge.parallel.layout import Layout
from accelbridge.train.check import check_processes, check_settings, check_tensor_parallel, resolve_layout
from accelbridge.train.config import TrainConfig
from accelbridge_xla import backend, hardware, runtimes
from accelbridge_xla.backend import XlaBackend
from accelbridge_xla.sharding import places


@pytest.fixture(autouse=True)
def _no_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    monkeypatch.delenv("CPU_NUM_DEVICES", raising=False)


def bus(folder: Path, *functions: tuple[str, str]) -> Path:
    """A PCI bus with these (vendor, device) ids, as Linux shows it."""
    for index, (vendor, device) in enumerate(functions):
        function = folder / f"0000:00:{index:02x}.0"
        function.mkdir()
        (function / "vendor").write_text(f"{vendor}\n")
        (function / "device").write_text(f"{device}\n")
    return folder


# -------------------------------------------------------------------------------------------------- detection


def test_chips_are_counted_on_the_bus(tmp_path: Path) -> None:
    found = hardware.find(bus(tmp_path, ("0x1ae0", "0x0063"), ("0x10de", "0x0063"), ("0x1ae0", "0x0063")))
    assert (found.chip, found.count) == ("TPU v5e", 2)


def test_a_chip_may_be_two_devices(tmp_path: Path) -> None:
    assert hardware.find(bus(tmp_path, ("0x1ae0", "0x0076"))).count == 2


@pytest.mark.parametrize("functions", [(), (("0x1ae0", "0x0042"),), (("0x8086", "0x0063"),)])
def test_no_chip_is_no_device(tmp_path: Path, functions: tuple[tuple[str, str], ...]) -> None:
    found = hardware.find(bus(tmp_path, *functions))
    assert found.count == 0
    assert "no TPU on the PCI bus; set PJRT_DEVICE=CPU and CPU_NUM_DEVICES=4" in found.reason


def test_virtual_devices_are_asked_for_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")  # importing torch_xla alone sets this
    assert hardware.find(tmp_path).count == 0
    monkeypatch.setenv("CPU_NUM_DEVICES", "6")
    found = hardware.find(tmp_path)
    assert (found.chip, found.count) == (hardware.VIRTUAL, 6)
    assert "evidence for no chip" in found.reason


@pytest.mark.parametrize("number", ["0", "-1", "many", "²"])
def test_a_number_of_virtual_devices_is_one(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", number)
    assert hardware.find().count == 0


def test_another_platform_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    assert "PJRT_DEVICE=NEURON is set" in hardware.find().reason


def test_torch_of_another_version_is_said() -> None:
    reason = runtimes.mismatch("torch_xla", {"torch": "2.13.0+cpu", "torch_xla": "2.9.0"})
    assert reason is not None
    assert "torch_xla 2.9.0 is built for torch 2.9, and torch 2.13.0+cpu is installed" in reason
    assert runtimes.mismatch("torch_xla", {"torch": "2.9.1+cu128", "torch_xla": "2.9.0"}) is None


def test_probing_imports_neither_torch_nor_torch_xla() -> None:
    code = (
        "import sys; from accelbridge_xla.backend import XlaBackend as B; p = B.probe(); assert p.reason; "
        "b = B(); b.capabilities('TPU v5e', {}); "
        "print([m for m in ('torch', 'torch_xla', '_XLAC') if m in sys.modules])"
    )
    path = [str(Path(backend.__file__).parent.parent), str(Path(backend.__file__).parents[3])]
    environment = {"PYTHONPATH": ":".join(path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ----------------------------------------------------------------------------------------------------- claims


def test_peaks_are_those_of_known_chips_only() -> None:
    assert XlaBackend.capabilities("TPU v6e", {}).chip.peak_flops == {"bfloat16": 918e12}
    assert XlaBackend.capabilities(hardware.VIRTUAL, {}).chip.peak_flops == {}


@pytest.mark.parametrize(
    ("op", "dtype", "reason"), [("linear", "float16", "no float16"), ("adamw", "bfloat16", "parameters stay float32")]
)
def test_what_is_refused_says_why(op: str, dtype: str, reason: str) -> None:
    support = XlaBackend.capabilities("TPU v5e", {}).support(op, dtype)
    assert not support
    assert reason in support.reason


def test_bfloat16_is_served_by_ops_with_gradients_in_float32() -> None:
    for op in ("linear", "embedding"):
        (wide,) = [i for i in XlaBackend().implementations() if (i.op, i.name) == (op, "float32_gradients")]
        assert wide.supports(Request(op, "bfloat16"))
        assert not wide.supports(Request(op, "float32"))


def test_references_that_are_wrong_are_never_taken() -> None:
    capabilities = XlaBackend.capabilities("TPU v5e", {})
    assert "do not wrap" in capabilities.wrong_reference("dropout", "float32")
    assert "in bfloat16" in capabilities.wrong_reference("linear", "bfloat16")
    assert capabilities.wrong_reference("linear", "float32") == ""


def test_adamw_serves_float32() -> None:
    (adamw,) = [i for i in XlaBackend().implementations() if i.op == "adamw"]
    assert adamw.supports(Request("adamw", "float32"))
    assert not adamw.supports(Request("adamw", "bfloat16"))


def test_there_are_no_process_groups() -> None:
    with pytest.raises(BackendError, match="a process group asked"):
        XlaBackend().collectives.control_group(1.0)


def test_several_processes_are_refused_before_anything_starts() -> None:
    with pytest.raises(NotSupportedYet, match="2 processes asked; the XLA backend runs on one host"):
        check_processes(2, XlaBackend.capabilities("TPU v5e", {}))
    check_processes(1, XlaBackend.capabilities("TPU v5e", {}))
    with pytest.raises(NotSupportedYet, match="2 processes asked; the XLA backend runs on one host"):
        XlaBackend().execution.start(None, World(size=2), Layout(), 1.0, False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        ("precision", {"compute": "float16"}, 'precision.compute "float16" asked; TPUs have no float16 arithmetic'),
        ("precision", {"params": "bfloat16"}, 'precision.params "bfloat16" asked; parameters stay float32'),
        ("memory", {"recompute": "full"}, "memory.recompute asked; XLA merges what is computed twice"),
    ],
)
def test_settings_are_refused_when_the_recipe_is_checked(section: str, settings: dict[str, str], message: str) -> None:
    config = TrainConfig.model_validate({section: settings})
    with pytest.raises(ConfigError, match=message):
        check_settings(config, XlaBackend.capabilities("TPU v5e", {}))


@pytest.mark.parametrize("axis", ["cp", "pp", "ep"])
def test_a_layout_that_is_not_realised_is_refused_when_the_recipe_is_checked(axis: str) -> None:
    parallel = TrainConfig.model_validate({"parallel": {axis: 2}}).parallel
    with pytest.raises(NotSupportedYet, match=f"parallel.{axis} 2 asked"):
        resolve_layout(parallel, 4, XlaBackend.capabilities("TPU v5e", {}))


def test_a_degree_that_divides_nothing_is_refused_when_the_recipe_is_checked() -> None:
    layout = resolve_layout(
        TrainConfig.model_validate({"parallel": {"tp": 4}}).parallel, 8, XlaBackend.capabilities("TPU v5e", {})
    )
    with pytest.raises(ConfigError, match=r"parallel.tp 4 asked; it splits model.heads 6, which is not a multiple"):
        check_tensor_parallel(layout, ModelConfig(vocab_size=64, dim=48, layers=1, heads=6, ffn_dim=64))


def test_what_the_cpu_client_cannot_cache_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hardware.CACHE_VARIABLE, "/somewhere")
    assert hardware.without_cache() == "", "nothing of a device that is not virtual"
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("CPU_NUM_DEVICES", "4")
    assert hardware.without_cache().startswith("XLA_PERSISTENT_CACHE_PATH /somewhere asked; XLA's CPU client writes")
    monkeypatch.delenv(hardware.CACHE_VARIABLE)
    assert hardware.without_cache() == ""


def test_another_precision_is_refused() -> None:
    import torch

    for precision in (Precision(compute="float16"), Precision("bfloat16", reduce="bfloat16")):
        with pytest.raises(NotSupportedYet, match="computes in float32 or bfloat16, and keeps and reduces in"):
            XlaBackend().execution.realise(torch.nn.Linear(2, 2), None, precision, torch.zeros)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------- places

BOTH = Layout(dp_shard=2, tp=2)


@pytest.mark.parametrize(
    ("shape", "attribute", "style", "stored"),
    [
        ((8, 4), "weight", "column", ("tp", "dp_shard")),
        ((8, 4), "weight", "row", ("dp_shard", "tp")),
        ((9, 4), "weight", "vocab_embedding", ("tp", "dp_shard")),
        ((8,), "bias", "column", (("tp", "dp_shard"),)),
        ((8,), "bias", "row", ("dp_shard",)),
        ((8,), "weight", "hidden", ("dp_shard",)),
        ((7, 4), "weight", None, (None, "dp_shard")),  # what divides is preferred
        ((7, 5), "weight", None, ("dp_shard", None)),  # else padded
        ((), "scale", None, ()),
    ],
)
def test_where_a_parameter_lies(shape: tuple[int, ...], attribute: str, style: str | None, stored: object) -> None:
    assert places(shape, attribute, style, BOTH).stored == stored


@pytest.mark.parametrize(("zero", "sharded"), [(1, "state"), (2, "state gradient"), (3, "state gradient stored")])
def test_a_zero_stage_says_what_is_sharded(zero: int, sharded: str) -> None:
    found = places((8, 4), "weight", "column", replace(BOTH, zero=zero))
    whole, split = ("tp", None), ("tp", "dp_shard")
    assert found.gathered == whole
    for name in ("state", "gradient", "stored"):
        assert getattr(found, name) == (split if name in sharded.split() else whole)


def test_without_tp_styles_change_nothing() -> None:
    assert places((8, 4), "weight", "row", Layout(dp_shard=4)).stored == ("dp_shard", None)
