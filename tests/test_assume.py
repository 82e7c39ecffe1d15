"""What ``--assume`` takes."""

from __future__ import annotations

import pytest

from accelbridge.assume import MOST_DEVICES, Assumption
from accelbridge.errors import ConfigError


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
