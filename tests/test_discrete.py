"""Binding a process to one of a host's devices: which one, and what is said where it is taken or full."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch

from accelbridge.backend import DeviceInfo, Probe, World
from accelbridge.errors import BackendError
from accelbridge.portable.discrete import DiscreteDevice, unless_set

FOUR = Probe(True, "four", tuple(DeviceInfo(index, "Acme 1 (a1)") for index in range(4)))
ONE = Probe(True, "one", FOUR.devices[:1])
NONE = Probe(False, "no driver")


class Module:
    """A ``torch.<type>`` that notes what it is asked, and refuses with ``error``."""

    def __init__(self, error: Exception | None = None) -> None:
        self.index: int | None = None
        self.error = error

    def set_device(self, index: int) -> None:
        self.index = index

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error


class AcmeDevice(DiscreteDevice):
    visible = ("ACME_VISIBLE_DEVICES", "ACME_ALSO")
    used_up = ("ACME out of memory",)
    busy = ("busy or unavailable",)
    lists = "acme-smi"
    flags: ClassVar[Mapping[str, Any]] = {"backends.acme.precision": "ieee"}

    def __init__(self, probe: Probe, module: Module) -> None:
        super().__init__("cpu", lambda: probe)
        self.module = module

    @property
    def _module(self) -> Any:
        return self.module


class Flags:
    precision = "none"


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> Flags:
    found = Flags()
    monkeypatch.setattr(torch.backends, "acme", found, raising=False)
    monkeypatch.delenv("ACME_VISIBLE_DEVICES", raising=False)
    return found


def test_a_rank_gets_the_device_of_its_number(flags: Flags) -> None:
    device = AcmeDevice(FOUR, Module())
    assert device.count() == 4
    assert device.bind(World(rank=6, size=8, local_rank=2, local_size=4)) == torch.device("cpu", 2)
    assert device.module.index == 2
    assert flags.precision == "ieee"


def test_a_rank_that_is_shown_one_device_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_VISIBLE_DEVICES", "3")
    assert AcmeDevice(ONE, Module()).bind(World(local_rank=3, local_size=4)).index == 0


@pytest.mark.parametrize(
    ("probe", "part"), [(FOUR, "found: 4 visible here"), (ONE, "found: 1 visible here"), (NONE, "found: no driver")]
)
def test_a_rank_without_a_device_is_refused(probe: Probe, part: str, flags: Flags) -> None:
    with pytest.raises(BackendError) as refused:
        AcmeDevice(probe, Module()).bind(World(local_rank=4, local_size=5))
    text = str(refused.value)
    assert "asked: a device for local rank 4 of 5" in text
    assert part in text
    assert "do: start at most as many ranks as there are devices, or show each rank one by ACME_VISIBLE_DEVICES" in text
    assert flags.precision == "none"  # nothing is touched


def made_out_of_memory(text: str) -> Exception:
    return torch.OutOfMemoryError(text)


@pytest.mark.parametrize(
    ("make", "message", "why", "do"),
    [
        (RuntimeError, "ACME out of memory. Tried", "its memory is used up by other processes", "end them"),
        (made_out_of_memory, "whatever", "its memory is used up by other processes", "end them"),
        (
            RuntimeError,
            "device(s) is/are busy or unavailable\nmore",
            "another process has it for itself",
            "wait for it",
        ),
        (RuntimeError, "link is down", "it cannot be opened", "the kernel's log"),
    ],
)
def test_a_device_that_is_taken_or_full_says_so(
    make: Callable[[str], Exception], message: str, why: str, do: str
) -> None:
    with pytest.raises(BackendError) as refused:
        AcmeDevice(FOUR, Module(make(message))).bind(World(local_rank=1, local_size=4))
    text = str(refused.value)
    assert text.startswith("asked: device 1 (Acme 1 (a1)); found: " + why)
    assert message.partition("\n")[0] in text
    assert "\n" not in text
    assert do in text
    assert "acme-smi" in text
    assert "ACME_VISIBLE_DEVICES" in text


def test_flags_that_torch_refuses_to_mix_are_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __setattr__(self, name: str, value: Any) -> None:
            raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch.backends, "acme", Refusing(), raising=False)
    with pytest.raises(BackendError, match=r"asked: torch\.backends\.acme\.precision = 'ieee'; found: mix of the"):
        AcmeDevice(FOUR, Module()).bind(World())


def test_out_of_memory_is_known_by_class_and_text() -> None:
    device = AcmeDevice(FOUR, Module())
    assert device.is_out_of_memory(RuntimeError("x: ACME out of memory. Tried to allocate"))
    assert device.is_out_of_memory(torch.OutOfMemoryError("whatever"))
    assert device.is_out_of_memory(MemoryError())
    assert not device.is_out_of_memory(RuntimeError("out of range"))
    assert not device.is_out_of_memory(ValueError("ACME out of memory"))


def test_a_variable_of_the_users_under_another_name_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLD_SIZE", "5")
    assert unless_set({"NEW_SIZE": "1", "B": "2"}, {"NEW_SIZE": ("OLD_SIZE",)}) == {"B": "2"}
