"""What ``--assume`` takes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from accelbridge.assume import MOST_DEVICES, Assumption, select
from accelbridge.errors import ConfigError
from accelbridge.software import OLDEST_TORCH


@pytest.mark.parametrize(
    "texts",
    [
        ("chip=a", "devices=8", "torch=2.13.0"),
        ("chip=a,devices=8,torch=2.13.0",),
        (" chip = a, devices = 8 ,torch=2.13.0",),
        ("chip=a,chip=a", "devices=8,torch=2.13.0"),
    ],
)
def test_keys_and_values_however_they_are_joined(texts: tuple[str, ...]) -> None:
    assert Assumption.parse(texts) == Assumption("a", 8, {"torch": "2.13.0"})


def test_nothing_is_assumed_unless_asked() -> None:
    assert Assumption.parse(()) is None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("chip", '"chip" asked; write KEY=VALUE'),
        ("chip=", '"chip=" asked; write KEY=VALUE'),
        ("chip=a,", '"" asked; write KEY=VALUE'),
        ("devices=2", "no chip is named"),
        ("chip=a,chip=b", "chip=a and chip=b asked"),
        ("chip=a,torch=2.9,torch=2.13", "torch=2.9 and torch=2.13 asked"),
        ("chip=a,devices=0", "devices=0 asked; write a whole number from 1"),
        ("chip=a,devices=-1", "devices=-1 asked"),
        ("chip=a,devices=\u0663", "devices=\u0663 asked"),
        (f"chip=a,devices={MOST_DEVICES + 1}", f"from 1 to {MOST_DEVICES}"),
        ("chip=a,devices=" + "9" * 5000, f"from 1 to {MOST_DEVICES}"),
    ],
)
def test_what_is_none_is_refused(text: str, part: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Assumption.parse([text])
    assert part in str(refused.value)


@pytest.mark.parametrize(
    ("backend", "chip", "known"),
    [
        ("cpu", "x86_64", "torch"),
        ("xla", "v5p", "torch, torch_xla, libtpu"),
        ("cuda", "h100", "torch, cuda, cudnn, nccl"),
    ],
)
def test_software_that_no_claim_reads_is_refused_by_every_backend(backend: str, chip: str, known: str) -> None:
    with pytest.raises(
        ConfigError, match=f'software "gloo" asked of backend "{backend}"; its claims depend on {known}'
    ):
        select(Assumption(chip, 1, {"gloo": "1.0"}), backend, None)
    with pytest.raises(ConfigError, match='torch "new" asked; that is no version'):
        select(Assumption(chip, 1, {"torch": "new"}), backend, None)


def test_a_torch_that_is_too_old_is_refused() -> None:
    for old in ("1.0", "2.8.1", "2.9.0.dev20250801"):
        with pytest.raises(ConfigError, match=r"torch .* asked; accelbridge needs 2\.9 or later"):
            select(Assumption("x86_64", 1, {"torch": old}), "cpu", None)
    found = select(Assumption("x86_64", 1, {"torch": "2.9.0"}), "cpu", None)
    assert found.probe.software == {"torch": "2.9.0"}
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST_TORCH}" in project["dependencies"]
