"""Network profiles: data of a backend, off unless a recipe names one, the user's environment before them."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from accelbridge.backend import Probe, Profile, World
from accelbridge.errors import BackendError, ConfigError
from accelbridge.plugins import Candidate, Selection
from accelbridge.portable.collectives import TorchCollectives
from accelbridge.train import network
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import Target, prepare
from accelbridge.train.run_plan import Provided
from accelbridge.train.world import apply_environment

PROFILES = {
    "fast": Profile("hosts with a fast network", {"NET_A": "1", "NET_B": "x"}, "a document, 2026"),
    "other": Profile("hosts with another", {"NET_C": "2"}, "a second document, 2026", needs="a plugin"),
}


class Networked(TorchCollectives):
    def environment(self, world: World) -> Mapping[str, str]:
        return {"NET_LIBRARY": "v"}

    def profiles(self) -> Mapping[str, Profile]:
        return PROFILES


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NET_A", "NET_B", "NET_C", "NET_LIBRARY"):
        monkeypatch.setenv(name, "")  # so that it is put back, also where it was absent
        monkeypatch.delenv(name)
    monkeypatch.setattr(network, "_SET", {})


def test_an_unknown_profile_lists_those_of_the_backend() -> None:
    with pytest.raises(ConfigError, match=r'"fats" asked; backend acme has fast, other; did you mean "fast"\?; choose'):
        network.resolve_network("fats", "acme", Networked("gloo"))
    with pytest.raises(ConfigError, match="this backend has no network profiles; remove it"):
        network.resolve_network("fast", "acme", TorchCollectives("gloo"))
    assert network.resolve_network(None, "acme", Networked("gloo")) is None


def test_a_profile_is_set_and_the_users_value_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NET_B", "mine")
    found = network.resolve_network("fast", "acme", Networked("gloo"))
    assert found is not None
    assert found.variables == {"NET_A": "1", "NET_B": "mine"}
    assert any(
        "NET_B=mine is set in the environment, and wins over x of network profile fast" in n for n in found.notes
    )
    assert any("NET_A=1 NET_B=x; source: a document, 2026" in note for note in found.notes)
    apply_environment(Networked("gloo"), World(), "fast")
    assert (os.environ["NET_A"], os.environ["NET_B"], os.environ["NET_LIBRARY"]) == ("1", "mine", "v")


def test_a_second_run_of_a_process_takes_its_own_profile() -> None:
    apply_environment(Networked("gloo"), World(), "fast")
    found = network.resolve_network("other", "acme", Networked("gloo"))
    assert found is not None
    assert found.variables == {"NET_C": "2"}
    assert any("needs a plugin" in note for note in found.notes)
    again = network.resolve_network("fast", "acme", Networked("gloo"))
    assert again is not None
    assert not any("wins" in note for note in again.notes)  # what we have set is no choice of the user's
    apply_environment(Networked("gloo"), World(), "other")
    assert "NET_A" not in os.environ
    assert os.environ["NET_C"] == "2"


def test_without_a_profile_nothing_of_one_is_set() -> None:
    apply_environment(Networked("gloo"), World())
    assert "NET_A" not in os.environ


def target(probe: Probe) -> Target:
    from accelbridge.cpu.backend import CpuBackend

    class Here(CpuBackend):
        collectives = Networked("gloo")  # pyright: ignore[reportAssignmentType]

    chosen = Candidate("cpu", "accelbridge", "0", "1.0", probe, False, Here)
    backend = Here()
    return Target(Selection(Here, chosen, "argument", ()), backend, Here.capabilities("x86_64", {}), note="by options")


def test_the_plan_shows_the_profile_and_ranks_have_to_agree_on_its_values(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig.of({"backend": {"profile": "fast"}})
    here = target(Probe(True, "here"))

    def plan():
        return prepare(config, World(), target=here, provided=Provided(model=True, loss=True), writes=False).plan

    first = plan()
    assert first.contract["network"] == {"profile": "fast", "NET_A": "1", "NET_B": "x"}
    assert any(note.startswith("network profile fast") for note in first.notes)
    assert "by options" in first.notes
    monkeypatch.setenv("NET_B", "mine")  # as it would be on another host
    assert plan().digest != first.digest
    unknown = TrainConfig.of({"backend": {"profile": "slow"}})
    with pytest.raises(ConfigError, match="fast, other"):
        prepare(unknown, World(), target=here, provided=Provided(model=True, loss=True), writes=False)


def test_devices_of_several_models_need_a_choice() -> None:
    from accelbridge.backend import DeviceInfo
    from accelbridge.cpu.backend import CpuBackend

    same = Probe(True, "", (DeviceInfo(0, "a"), DeviceInfo(1, "a")))
    mixed = Probe(True, "", (DeviceInfo(0, "a"), DeviceInfo(1, "b")))
    assert CpuBackend().chip(same) == ("a", "")
    assert CpuBackend().chip(Probe(True, "")) == ("unknown", "")
    with pytest.raises(BackendError, match="found: a and b, one plan cannot serve several models"):
        CpuBackend().chip(mixed)
