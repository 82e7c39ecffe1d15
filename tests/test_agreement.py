"""Ranks agree on one plan, or all of them fail at once with the difference: with real processes and real plans.

Four processes play all of :data:`SCENES` one after the other on one store, so that the runs also must not
collide. ``time.monotonic`` is the same clock in all processes of a host.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from accelbridge import agreement
from accelbridge.agreement import agree, flatten
from accelbridge.backend import Request, World
from accelbridge.cpu.backend import CpuBackend
from accelbridge.errors import AgreementError
from accelbridge.parallel.layout import Layout
from accelbridge.plan import PlanInputs, resolve
from accelbridge.plugins import choose
from tests.plugins_env import Plugin, backend_source, environment, install, once, write_tokens
from tests.ranks import Rank, outcomes

PROCESSES = 4
LONG_S = 60.0
"""A time limit that no scene may come near."""
SOON_S = 5.0


class OtherBackend(CpuBackend):
    """The same under another name."""

    name = "other"


def contract(
    *,
    size: int = PROCESSES,
    layout: Layout | None = None,
    backend: type[CpuBackend] = CpuBackend,
    version: str = "",
    torch_version: str = "",
    wire: str = "float32",
    ops: Mapping[str, str] | None = None,
    recipe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The contract of a real plan, as every rank resolves it."""
    selection = choose("cpu")
    candidate = replace(selection.candidate, version=version or selection.candidate.version)
    if torch_version:
        candidate = replace(candidate, probe=replace(candidate.probe, software={"torch": torch_version}))
    inputs = PlanInputs(
        requests=[Request("attention", "float32", {"head_dim": 16}), Request("adamw", "float32")],
        layout=(layout or Layout(dp_shard=size)).as_dict(),
        wire=[("all_reduce", wire, "sum")],
        recipe={"optimizer.lr": 1e-3, "train.seed": 0} | dict(recipe or {}),
        data={"train": "0123"},
        world_size=size,
        chosen_ops=ops or {},
    )
    made = backend()
    capabilities = made.capabilities("x86_64", candidate.probe.software)
    return dict(resolve(replace(selection, candidate=candidate), made, capabilities, inputs).contract)


# ------------------------------------------------------------------------------------------------------- scenes


@dataclass(frozen=True)
class Part:
    """What one process does in a scene."""

    rank: int
    size: int = PROCESSES
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of :func:`contract`."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Put into the contract as it is."""
    run_id: str = ""
    """Default: the scene's own."""
    restart: int = 0
    delay: float = 0.0
    role: str = ""
    """"host": hosts the store of this scene; "dies early", "dies late": and ends before, after the verdict;
    "silent": states its plan and publishes nothing."""


def everyone(*odd: Part, size: int = PROCESSES) -> dict[int, Part]:
    """Rank r in process r, all with equal contracts, but for the ``odd`` ones."""
    return {rank: Part(rank, size) for rank in range(size)} | {part.rank: part for part in odd}


@dataclass(frozen=True)
class Scene:
    """Parts by process; a process without a part is absent."""

    parts: Mapping[int, Part]
    timeout: float = LONG_S
    grace: float = agreement._GRACE_SECONDS
    """Shorter than the product's where a scene shows what comes after it."""


def odd(rank: int = 2, **changes: Any) -> Scene:
    return Scene(everyone(Part(rank, changes=changes)))


SCENES: dict[str, Scene] = {
    "equal": Scene(everyone()),
    "backend": odd(backend=OtherBackend),
    "implementation": odd(ops={"attention": "reference"}),
    "wire": odd(wire="bfloat16"),
    "version": odd(3, version="0.2.0"),
    "software": odd(1, torch_version="2.9.0"),
    "recipe": odd(3, recipe={"optimizer.lr": 1e-2}),
    "layout": odd(1, layout=Layout(dp_replicate=2, dp_shard=2)),
    "first": odd(0, recipe={"train.seed": 7}),
    "two kinds": Scene(
        everyone(
            Part(1, changes={"recipe": {"optimizer.lr": 1e-2}}),
            Part(2, changes={"wire": "bfloat16"}),
            Part(3, changes={"wire": "bfloat16"}),
        )
    ),
    "types": Scene(
        everyone(
            Part(0, extra={"a": True, "b": "1", "c": "absent"}),
            Part(1, extra={"a": 1, "b": 1}),
            Part(2, extra={"a": True, "b": "1", "c": "absent"}),
            Part(3, extra={"a": True, "b": "1", "c": "absent"}),
        )
    ),
    "true and 1": Scene({0: Part(0, 2, extra={"a": True}), 1: Part(1, 2, extra={"a": 1})}),
    "late": Scene(everyone(Part(3, delay=1.0)), timeout=20.0),
    "absent": Scene({rank: Part(rank) for rank in (0, 1, 3)}, timeout=0.5),
    "absent and different": Scene({0: Part(0), 1: Part(1, changes={"wire": "bfloat16"})}, timeout=0.5),
    "too late": Scene(everyone(Part(2, delay=2.0)), timeout=0.5),
    "zero absent": Scene({rank: Part(rank) for rank in (1, 2, 3)}, timeout=0.5),
    "zero silent": Scene(everyone(Part(0, role="silent")), timeout=0.5, grace=0.5),
    "zero late": Scene({0: Part(0, delay=2.0), 1: Part(1), 2: Part(2)}, timeout=1.5, grace=1.0),
    "larger world": Scene({0: Part(0, 2, delay=0.7), 1: Part(1, 2, delay=0.7), 2: Part(2, 3)}),
    "larger world, late": Scene({0: Part(0, 2), 1: Part(1, 2), 2: Part(2, 3, delay=1.0)}),
    "alone": Scene({0: Part(0, 1, delay=0.7), 1: Part(1, 2)}),
    "rank outside": Scene({0: Part(0, 2, delay=0.7), 1: Part(1, 2, delay=0.7), 2: Part(5, 2)}),
    "two runs": Scene(
        {
            0: Part(0, 2, run_id="a"),
            1: Part(1, 2, run_id="a"),
            2: Part(0, 2, {"wire": "bfloat16"}, run_id="b"),
            3: Part(1, 2, {"wire": "float64"}, run_id="b"),
        }
    ),
    "again 1": Scene(everyone(*(Part(r, run_id="again") for r in range(4)))),
    "again 2": Scene(everyone(*(Part(r, run_id="again", changes={"wire": "bfloat16"}) for r in range(4)))),
    "restarted": Scene(everyone(*(Part(r, run_id="again", changes={"wire": "float64"}, restart=1) for r in range(4)))),
    "other restart": Scene({0: Part(0, 2, restart=1), 1: Part(1, 2, restart=2)}, timeout=0.5, grace=0.5),
    "zero hosts": Scene(everyone(Part(0, 3, role="host"), size=3)),
    # A process that dies plays no more: these come last.
    "zero dies early": Scene({3: Part(0, 3, role="dies early"), 1: Part(1, 3), 2: Part(2, 3)}),
    "zero dies late": Scene({0: Part(0, 3, role="dies late"), 1: Part(1, 3), 2: Part(2, 3)}),
}


def play(ctx: Rank, folder: str) -> None:
    """All scenes from the point of view of one process; one line of JSON for each part it plays."""
    store = ctx.store()
    alive = set(range(ctx.size))
    contract()  # warm: the first plan imports things
    with open(f"{folder}/{ctx.rank}", "w", buffering=1) as log:
        for name, scene in SCENES.items():
            _barrier(store, name, len(alive))
            if part := scene.parts.get(ctx.rank):
                agreement._GRACE_SECONDS = scene.grace
                log.write(json.dumps(_act(store, name, part, scene.timeout)) + "\n")
            alive -= {process for process, part in scene.parts.items() if part.role.startswith("dies")}


def _barrier(store: Any, name: str, count: int) -> None:
    if store.add(f"barrier/{name}", 1) == count:
        store.set(f"open/{name}", "")
    store.wait([f"open/{name}"])


def _act(store: Any, scene: str, part: Part, timeout: float) -> dict[str, Any]:
    changes: dict[str, Any] = {"size": part.size} | dict(part.changes)
    stated = contract(**changes) | dict(part.extra)
    world = World(part.rank, part.size, part.rank, part.size, part.run_id or scene, part.restart)
    if any(other.role in ("host", "dies early", "dies late") for other in SCENES[scene].parts.values()):
        store = _own_store(store, scene, part)
    time.sleep(part.delay)
    start = time.monotonic()
    error = ""
    try:
        _agree_as(part.role)(store, world, stated, timeout)
    except AgreementError as e:
        error = str(e)
    return {"scene": scene, "rank": part.rank, "start": start, "end": time.monotonic(), "error": error}


def _own_store(store: Any, scene: str, part: Part) -> Any:
    """The store that rank 0 of this scene hosts."""
    if not part.role:
        return TCPStore("127.0.0.1", int(store.get(f"port/{scene}")), is_master=False)
    mine = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set(f"port/{scene}", str(mine.port))
    return mine


def _agree_as(role: str) -> Callable[..., None]:
    if role == "dies early":
        agreement._Meeting.publish = _die
    if role == "dies late":
        agreement._Meeting.wait_for_readers = _die
    return _only_state if role == "silent" else agree


def _die(self: agreement._Meeting) -> NoReturn:
    os._exit(1)


def _only_state(store: Any, world: World, stated: dict[str, Any], timeout: float) -> None:
    prefix = f"accelbridge/{world.run_id}/{world.restart}"
    agreement._Meeting(PrefixStore("0", PrefixStore(prefix, store)), world).state(json.dumps(stated, sort_keys=True))


# ---------------------------------------------------------------------------------------------------- the tests


class Played:
    """How a scene ended, by process."""

    def __init__(self, scene: Scene, lines: dict[int, dict[str, Any]]) -> None:
        self.scene, self.lines = scene, lines

    @property
    def errors(self) -> dict[int, str]:
        return {process: line["error"] for process, line in self.lines.items()}

    def seconds(self, process: int) -> float:
        """From the last arrival, or from its own where it arrived after the verdict."""
        return self.lines[process]["end"] - max(line["start"] for line in self.lines.values())

    def all_raise(self, *patterns: str, within: float = SOON_S) -> None:
        assert set(self.errors) == set(self.scene.parts)
        assert len(set(self.errors.values())) == 1, "one verdict for all"
        for process, error in self.errors.items():
            for pattern in patterns:
                assert re.search(pattern, error, re.MULTILINE), error
            assert self.seconds(process) < within

    def all_agree(self, within: float = SOON_S) -> None:
        assert self.errors == dict.fromkeys(self.scene.parts, "")
        assert all(self.seconds(process) < within for process in self.errors)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Played]:
    """Play everything once."""

    def make(folder: Path) -> None:
        ends = outcomes(play, PROCESSES, str(folder), timeout=120)
        assert [end.error for end in ends] == ["died", "", "", "died"], ends

    folder = once(tmp_path_factory, "played", make)
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for process in range(PROCESSES):
        for line in (folder / str(process)).read_text().splitlines():
            entry = json.loads(line)
            found.setdefault(entry["scene"], {})[process] = entry
    return lambda name: Played(SCENES[name], found.get(name, {}))


def test_equal_contracts_pass_quickly(played: Callable[[str], Played]) -> None:
    played("equal").all_agree(within=2.0)


DIFFERENCES = {
    "backend": r"^  backend: cpu on rank 0; other on rank 2$",
    "implementation": r"^  ops\.attention: sdpa on rank 0; reference on rank 2$",
    "wire": r"^  wire\.all_reduce: float32 sum on rank 0; bfloat16 sum on rank 2$",
    "version": r"^  plugin: accelbridge 0\.1\.0 on rank 0; accelbridge 0\.2\.0 on rank 3$",
    "software": r"^  software\.torch: \d\S+ on rank 0; 2\.9\.0 on rank 1$",
    "recipe": r"^  recipe\.optimizer\.lr: 0\.001 on rank 0; 0\.01 on rank 3$",
    "layout": r"^  layout\.dp_replicate: 1 on rank 0; 2 on rank 1\n  layout\.dp_shard: 4 on rank 0; 2 on rank 1$",
    "first": r"^  recipe\.train\.seed: 7 on rank 0; 0 on rank 1-3$",
}


@pytest.mark.parametrize("scene", DIFFERENCES)
def test_a_difference_stops_every_rank(scene: str, played: Callable[[str], Played]) -> None:
    found = played(scene)
    found.all_raise(r"^ranks resolved different plans; make these equal on all ranks:$", DIFFERENCES[scene])
    assert len(found.errors[0].splitlines()) == 1 + DIFFERENCES[scene].count("on rank 0"), "nothing else differs"


def test_two_kinds_of_difference(played: Callable[[str], Played]) -> None:
    played("two kinds").all_raise(
        r"^  recipe\.optimizer\.lr: 0\.001 on rank 0; 0\.01 on rank 1$",
        r"^  wire\.all_reduce: float32 sum on rank 0; bfloat16 sum on rank 2, 3$",
    )


def test_values_of_another_type_differ(played: Callable[[str], Played]) -> None:
    played("true and 1").all_raise(r"^  a: true on rank 0; 1 on rank 1$", r"^ranks resolved different plans;")
    played("types").all_raise(
        r"^  a: true on rank 0; 1 on rank 1$",
        r'^  b: "1" on rank 0; 1 on rank 1$',
        r'^  c: "absent" on rank 0; absent on rank 1$',
    )


def test_a_rank_that_is_late_but_in_time(played: Callable[[str], Played]) -> None:
    played("late").all_agree(within=2.0)


def test_an_absent_rank(played: Callable[[str], Played]) -> None:
    found = played("absent")
    found.all_raise(r"^rank 2 did not state a plan in time \(present: 0, 1, 3\); look at the log of the absent")
    assert all(line["end"] - found.lines[0]["start"] > 0.45 for line in found.lines.values()), "it waits its time"


def test_absent_ranks_and_a_difference(played: Callable[[str], Played]) -> None:
    played("absent and different").all_raise(
        r"^ranks 2, 3 did not state a plan in time \(present: 0, 1\)",
        r"^  wire\.all_reduce: float32 sum on rank 0; bfloat16 sum on rank 1$",
    )


def test_a_rank_that_is_too_late_raises_at_once(played: Callable[[str], Played]) -> None:
    found = played("too late")
    found.all_raise(r"^rank 2 did not state a plan in time \(present: 0, 1, 3\)", within=1.0)


def test_rank_0_absent(played: Callable[[str], Played]) -> None:
    played("zero absent").all_raise(r"^rank 0 did not state a plan in time \(present: 1-3\)")


def test_rank_0_states_a_plan_and_falls_silent(played: Callable[[str], Played]) -> None:
    errors = played("zero silent").errors
    assert set(errors) == set(range(4))
    assert {errors[p] for p in (1, 2, 3)} == {
        "rank 0 stated its plan but published no verdict in time; look at its log"
    }


def test_whoever_waited_longest_says_who_is_absent(played: Callable[[str], Played]) -> None:
    # Rank 0 comes when the others' time is nearly up, and is not left behind with a limit of its own.
    played("zero late").all_raise(r"^rank 3 did not state a plan in time \(present: 0-2\)", within=1.4)


def test_a_rank_of_a_larger_world(played: Callable[[str], Played]) -> None:
    played("larger world").all_raise(r"^  world_size: 2 on rank 0; 3 on rank 2$")
    late = played("larger world, late").errors
    assert (late[0], late[1]) == ("", ""), "their world was complete before it came"
    assert "rank 2 does not belong to this run, which has gone on without it:" in late[2]
    assert "world_size: 2 on rank 0; 3 on rank 2" in late[2]


def test_rank_0_of_a_smaller_world(played: Callable[[str], Played]) -> None:
    played("alone").all_raise(r"^  world_size: 1 on rank 0; 2 on rank 1$")


def test_a_rank_outside_its_own_world(played: Callable[[str], Played]) -> None:
    played("rank outside").all_raise(r"ranks 0, 1, 5 are there; the world has 2 ranks; make RANK and WORLD_SIZE fit")


def test_two_runs_on_one_store(played: Callable[[str], Played]) -> None:
    errors = played("two runs").errors
    assert (errors[0], errors[1]) == ("", "")
    assert errors[2] == errors[3]
    assert "wire.all_reduce: bfloat16 sum on rank 0; float64 sum on rank 1" in errors[2]


def test_a_process_may_agree_again_in_the_same_run(played: Callable[[str], Played]) -> None:
    played("again 1").all_agree()
    played("again 2").all_agree()


def test_a_restart_begins_anew(played: Callable[[str], Played]) -> None:
    played("restarted").all_agree()
    errors = played("other restart").errors
    assert "rank 1 did not state a plan in time" in errors[0]
    assert "rank 0 did not state a plan in time" in errors[1]


def test_rank_0_hosts_the_store(played: Callable[[str], Played]) -> None:
    played("zero hosts").all_agree(within=2.0)


def test_rank_0_dies_before_it_publishes(played: Callable[[str], Played]) -> None:
    found = played("zero dies early")
    assert set(found.errors) == {1, 2}
    for process, error in found.errors.items():
        assert error.startswith(f"rank {process}: the store through which the ranks agree was lost; ")
        assert "\n" not in error
        assert found.seconds(process) < SOON_S


def test_rank_0_dies_after_it_has_published(played: Callable[[str], Played]) -> None:
    found = played("zero dies late")
    assert set(found.errors) == {1, 2}
    for process, error in found.errors.items():  # it read the verdict in time, or the store was gone
        assert error == "" or "the store through which the ranks agree was lost" in error
        assert found.seconds(process) < SOON_S


def test_one_process_is_a_world() -> None:
    store = HashStore()
    agree(store, World(), contract(size=1), LONG_S)
    agree(store, World(), contract(size=1, wire="bfloat16"), LONG_S)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([3], "3"), ([0, 1], "0, 1"), ([0, 1, 2, 5], "0-2, 5"), ([1, 3, 4, 5, 6, 8, 9], "1, 3-6, 8, 9")],
)
def test_ranks_are_written_as_ranges(ranks: list[int], text: str) -> None:
    assert agreement._ranks(ranks) == text


def test_differences_are_never_empty() -> None:
    assert flatten({"a": {"b": 1, "c": {}}}) == {"a.b": 1}
    assert agreement._differences({"data": {}}, {1: {}}) == ["  the contract of rank 1 has other empty sections"]


# --------------------------------------------------------------------------------------------------- end to end

RECIPE = """\
model: {vocab_size: 64, dim: 32, layers: 1, heads: 2}
data: {train: tokens}
train: {steps: 2, global_batch_size: 6, seq_len: 16}
parallel: {agreement_timeout: 60}
"""


def workplace(folder: Path) -> Path:
    """A folder with a recipe and its data."""
    write_tokens(folder / "tokens")
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def start(folder: Path, rank: int, size: int, port: int, *options: str, **env: str) -> subprocess.Popen[str]:
    """One rank, as torchrun starts it; the store is hosted here."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    launched = {name: str(value) for name, value in place.items()}
    launched |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "e2e"}
    return subprocess.Popen(
        [sys.executable, "-m", "accelbridge", "train", "recipe.yaml", *options],
        cwd=folder,
        env=environment() | launched | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(ranks: list[subprocess.Popen[str]]) -> list[str]:
    """What every rank wrote to stderr; each must have refused."""
    try:
        texts = [process.communicate(timeout=100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for process, (out, err) in zip(ranks, texts, strict=True):
        assert (process.returncode, out) == (2, ""), err
    return [err for _, err in texts]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three ranks: rank 1 has another learning rate, rank 2 another backend."""

    def make(folder: Path) -> None:
        site = install(folder / "plugins", [Plugin("virtual", backend_source("virtual"))])
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        workplace(folder)
        texts = finish(
            [
                start(folder, 0, 3, server.port),
                start(folder, 1, 3, server.port, "--set", "optimizer.lr=1e-2"),
                start(folder, 2, 3, server.port, PYTHONPATH=str(site), ACCELBRIDGE_BACKEND="virtual"),
            ]
        )
        assert not list((folder / "runs").rglob("checkpoints/*"))
        (folder / "texts").write_text(json.dumps(texts))

    return json.loads((once(tmp_path_factory, "refused", make) / "texts").read_text())


def test_train_stops_on_every_rank_with_the_difference(refused: list[str]) -> None:
    for rank, text in enumerate(refused):
        _, _, error = text.rpartition(f"error: rank {rank}: ")
        assert error.startswith("ranks resolved different plans; make these equal on all ranks:\n")
        assert "  recipe.optimizer.lr: 0.0003 on rank 0; 0.01 on rank 1\n" in error
        assert "  backend: cpu on rank 0; virtual on rank 2\n" in error
        assert "  plugin: accelbridge 0.1.0 on rank 0; vendor-virtual 1.0 on rank 2\n" in error


def test_train_shows_no_traceback(refused: list[str]) -> None:
    assert not [text for text in refused if "Traceback" in text]


def test_train_stops_where_a_rank_never_comes(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = start(workplace(tmp_path), 1, 2, server.port, "--set", "parallel.agreement_timeout=0.5")
    (text,) = finish([rank])
    assert "\nerror: rank 1: rank 0 did not state a plan in time (present: 1)" in f"\n{text}"
