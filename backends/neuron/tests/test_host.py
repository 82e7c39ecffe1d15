"""Probing: what the driver and neuron-ls may show, and what it means. Data files; see tests/data/probes/README.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from accelbridge.backend import Probe
from accelbridge.errors import ConfigError
from accelbridge_neuron import driver, facts, host
from accelbridge_neuron.backend import NeuronBackend
from accelbridge_neuron.driver import Reading
from accelbridge_neuron.host import Software

DATA = Path(__file__).parents[3] / "tests" / "data" / "probes" / "neuron"
NATIVE = Software("2.13.0", "2.13.3.0", importable=True)


def lay_out(name: str, root: Path) -> Path:
    """The host of one file, under ``root``."""
    made = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    for path, text in made["files"].items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    if found := made.get("neuron_ls"):
        tool = root / driver.LISTER
        tool.parent.mkdir(parents=True)
        lines = f"cat <<'END'\n{found['stdout']}\nEND\ncat >&2 <<'END'\n{found['stderr']}\nEND\nexit {found['exit']}\n"
        tool.write_text(f"#!/bin/sh\n{lines}")
        tool.chmod(0o755)
    return root


def reading_of(name: str) -> list[str]:
    """The devices of one file."""
    return [path for path in json.loads((DATA / f"{name}.json").read_text())["files"] if path.endswith("device_name")]


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # with no neuron-ls of this host's
    return lambda name: driver.read(lay_out(name, tmp_path))


def judge(found: Reading, environment: Mapping[str, str] | None = None, software: Software = NATIVE) -> Probe:
    return host.judge(found, environment or {}, software)


@pytest.mark.parametrize(
    ("name", "chip", "cores", "gib"),
    [
        ("trn2", "AWS Trainium2", 64, 24),
        ("trn2-3xlarge", "AWS Trainium2", 4, 24),
        ("trn2-lnc1", "AWS Trainium2", 8, 12),
        ("trn3", "AWS Trainium3", 16, 36),
    ],
    ids=["trn2", "trn2-3xlarge", "trn2-lnc1", "trn3"],
)
def test_a_host_is_listed(reading, name: str, chip: str, cores: int, gib: int) -> None:
    found = judge(reading(name))
    assert found.available, found.reason
    assert found.reason == f"{cores} x {chip}"
    assert [device.index for device in found.devices] == list(range(cores))
    assert {(device.chip, device.memory_bytes) for device in found.devices} == {(chip, gib << 30)}
    assert found.software == {"torch": "2.13.0", "torch_neuronx": "2.13.3.0"}
    assert NeuronBackend.capabilities(chip, found.software).support("linear", "bfloat16")


@pytest.mark.parametrize("name", ["trn2", "trn3"])
def test_a_machine_is_listed(reading, name: str) -> None:
    found = judge(reading(name))
    assert found.available
    first, last = (f"/{driver.CLASS}/neuron{number}/neuron_core" for number in (0, len(reading_of(name)) - 1))
    paths = [device.path for device in found.devices]
    assert paths[:4] == [f"{first}{core}" for core in (0, 2, 4, 6)]  # a logical core is two physical ones
    assert paths[-1] == f"{last}6"
    assert len(set(paths)) == len(paths)  # evidence of hardware needs each device shown


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("trn1", ("Trn1 is refused", "ended training through PyTorch/XLA with Neuron 2.30", "Trn2 and Trn3 only")),
        ("inf2", ("Inf2 is refused",)),
        ("unknown", ('"Trainium9" is not one of Trainium2, Trainium3',)),
        ("mixed", ("several models on one host: Trainium2, Trainium3",)),
        ("no-device", ("driver is loaded, but it shows no device", "--device=/dev/neuron0")),
        ("no-driver", ("no Neuron driver", "install aws-neuronx-dkms")),
    ],
    ids=["trn1", "inf2", "unknown", "mixed", "no-device", "no-driver"],
)
def test_what_is_refused_says_why(reading, name: str, parts: tuple[str, ...]) -> None:
    found = judge(reading(name))
    assert not found.available
    assert not found.devices
    for part in parts:
        assert part in found.reason


def test_the_sdk_of_another_torch_is_refused(reading) -> None:
    found = judge(reading("trn2"), software=Software("2.14.0", "2.13.3.0", importable=True))
    assert not found.available
    assert "torch-neuronx 2.13.3.0 is built for torch 2.13, and torch 2.14.0 is installed; install" in found.reason


@pytest.mark.parametrize("old", ["2.9.0.2.11.19912", "2.8.0.2.10.16998", "0.1.0"])
def test_the_xla_package_is_refused(reading, old: str) -> None:
    """It has the same name; the native one begins with torch 2.13."""
    found = judge(reading("trn2"), software=Software("2.13.0", old, importable=True))
    assert not found.available
    assert f"torch-neuronx {old} is refused" in found.reason
    assert "PyTorch/XLA package, which AWS no longer supports for training" in found.reason


@pytest.mark.parametrize(
    ("software", "part"),
    [
        (Software("2.13.0", "", importable=False), "devices are here, but no torch_neuronx; install torch-neuronx"),
        (Software("2.13.0", "2.13.3.0", importable=False), "devices are here, but no torch_neuronx"),
        (Software("", "2.13.3.0", importable=True), "torch is not installed"),
        (Software("2.13.0", "latest", importable=True), "versions that are none"),
    ],
)
def test_software_that_is_missing_is_named(reading, software: Software, part: str) -> None:
    found = judge(reading("trn2"), software=software)
    assert not found.available
    assert part in found.reason


def test_a_device_in_use_is_said_and_not_refused(reading) -> None:
    """It may be another rank of this run."""
    found = judge(reading("busy"))
    assert found.available
    assert found.reason == "4 x AWS Trainium2; in use: neuron0 by pid 4711 (python serve.py)"


@pytest.mark.parametrize(
    ("name", "count", "why"),
    [
        ("no-lister", 8, "neuron-ls is not installed"),
        ("lister-fails", 4, "neuron-ls ended with 1: neuron-ls: failed to open /dev/neuron0: Permission denied"),
        ("lister-garbled", 4, "neuron-ls printed no JSON"),
    ],
)
def test_without_neuron_ls_cores_are_counted_by_default(reading, name: str, count: int, why: str) -> None:
    found = judge(reading(name))
    assert found.available
    assert len(found.devices) == count
    assert {device.memory_bytes for device in found.devices} == {None}
    assert f"logical cores counted by default (LNC 2): {why}" in found.reason


@pytest.mark.parametrize(("text", "count"), [("0-3", 4), ("2", 1), ("0,5-6", 3)])
def test_visible_cores_are_read(reading, text: str, count: int) -> None:
    found = judge(reading("trn2"), {"NEURON_RT_VISIBLE_CORES": text})
    assert len(found.devices) == count


@pytest.mark.parametrize(("text", "part"), [("all", '"all" is no core'), ("0-64", "names core 64; here are 0 to 63")])
def test_visible_cores_that_are_none_are_refused(reading, text: str, part: str) -> None:
    found = judge(reading("trn2"), {"NEURON_RT_VISIBLE_CORES": text})
    assert not found.available
    assert part in found.reason


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"index": 0}]'])
def test_json_of_another_form_is_said(text: str) -> None:
    assert driver.parse(text) == (None, "neuron-ls printed JSON of another form")


def test_assumed_chips() -> None:
    with pytest.raises(ConfigError, match=re.escape('chip "trn1" asked of backend "neuron": Trn1 is refused')):
        NeuronBackend.assume("trn1", 1, {})
    probe = NeuronBackend.assume("trn3", 2, {"torch": "2.14.0"})
    assert probe.software == {"torch": "2.14.0", "torch_neuronx": "2.14.3.0"}
    for chip in facts.CHIPS.values():
        cell = facts.capabilities(chip, {}).support("scaled_mm", "float8_e4m3fn", "tensor")
        assert "no fp8 training interface" in cell.reason
    assert not facts.capabilities("AWS Trainium1", {}).support("linear", "bfloat16")


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64, 96])
def test_sizes_of_groups(size: int) -> None:
    assert facts.replica_size(size)
    assert not facts.replica_size(size * 3 if size < 32 else size + 1)
