"""The command line as somebody meets it first: help, devices, explain, usage errors; at any width, or piped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelbridge.backend import DeviceInfo, Lowering, Probe
from accelbridge.cli import main
from accelbridge.plan import ExecutionPlan, OpChoice, Rejected
from accelbridge.plugins import Candidate
from accelbridge.render import devices_text, plan_text
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import prepare
from accelbridge.train.world import world_from_environment
from tests import cli

Call = Callable[..., tuple[int, str, str]]
COMMANDS = ["train", "devices", "explain", "report", "data", "data build", "data verify", "data show"]
COMMANDS += ["checkpoint", "checkpoint export", "checkpoint verify", "checkpoint list", "config", "config import"]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """``accelbridge ARGS`` in this process: exit code, stdout, stderr."""
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "ACCELBRIDGE_BACKEND"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["accelbridge", *args])
        code = 0
        try:
            main()
        except SystemExit as left:
            code = int(left.code or 0)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def recipe(tmp_path: Path, store: Path) -> Path:
    return cli.write_recipe(tmp_path / "recipe.yaml", store)


# ------------------------------------------------------------------------------------------------ help, usage


@pytest.mark.parametrize("command", ["", *COMMANDS])
@pytest.mark.parametrize("width", [80, 120])
def test_help(call: Call, monkeypatch: pytest.MonkeyPatch, command: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    code, out, err = call(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert out.startswith("Usage: ")
    plain(out, width)


def test_help_of_train_names_what_matters(call: Call) -> None:
    _, out, _ = call("train", "--help")
    for part in (
        "RECIPE",
        "--nproc",
        "--backend",
        "--set A.B=C",
        "--resume auto|PATH",
        "--port",
        "ACCELBRIDGE_BACKEND",
    ):
        assert part in out


def test_help_is_instant() -> None:
    """It loads none of what takes seconds."""
    heavy = ("torch", "numpy", "pydantic", "ruamel.yaml", "matplotlib")
    code = (
        "import sys; sys.argv = ['accelbridge', 'train', '--help']\n"
        "from accelbridge.cli import main\n"
        "try:\n    main()\n"
        f"finally:\n    print([name for name in {heavy} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    loaded = done.stdout.splitlines()[-1]
    assert "torch" not in loaded
    assert "numpy" not in loaded


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["train"], "Missing argument 'RECIPE'"),
        (["train", "a", "b"], "unexpected extra argument"),
        (["train", "a", "--nope"], "No such option: --nope"),
        (["train", "a", "--nproc"], "requires an argument"),
        (["train", "a", "--nproc", "two"], "--nproc"),
        (["train", "a", "--nproc", "0"], "--nproc"),
        (["train", "a", "--port", "70000"], "--port"),
        (["tain", "a"], "No such command 'tain'"),
        (["data", "make"], "No such command 'make'"),
        (["data", "build", "a"], "Missing argument"),
        (["devices", "cpu"], "unexpected extra argument"),
        (["explain", "--jsn"], "No such option: --jsn"),
        (["report"], "Missing argument"),
    ],
)
def test_usage_errors_are_short_and_exit_with_2(call: Call, args: list[str], part: str) -> None:
    code, out, err = call(*args)
    assert (code, out) == (2, "")
    assert part in err
    assert len(err.splitlines()) <= 5
    assert "Traceback" not in err
    plain(err, 110)


@pytest.mark.parametrize(
    "args", [["explain", "absent.yaml"], ["report", "absent"], ["data", "show", "absent"], ["data", "verify", "absent"]]
)
def test_what_is_not_there(call: Call, tmp_path: Path, args: list[str]) -> None:
    code, out, err = call(*args[:-1], str(tmp_path / args[-1]))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert str(tmp_path / args[-1]) in err
    assert "Traceback" not in err


def test_version(call: Call) -> None:
    code, out, _ = call("--version")
    assert code == 0
    assert re.fullmatch(r"accelbridge \d+\.\d+\.\d+\S*\n", out)


# ------------------------------------------------------------------------------------------- devices, explain


def test_devices(call: Call) -> None:
    code, out, err = call("devices")
    assert (code, err) == (0, "")
    row = next(line for line in out.splitlines() if line.startswith("cpu "))
    assert re.search(r"yes +\d+ x \S+ +accelbridge \S+ +1\.0$", row)


def test_devices_as_json(call: Call) -> None:
    code, out, _ = call("devices", "--json")
    assert code == 0
    rows = json.loads(out)
    assert isinstance(rows, list)
    keys = {"name", "available", "reason", "distribution", "version", "api_version", "devices"}
    assert all(set(row) >= keys for row in rows)
    cpu = next(row for row in rows if row["name"] == "cpu")
    assert cpu["available"] is True
    assert {"index", "chip"} <= set(cpu["devices"][0])


def test_explain_without_a_recipe(call: Call) -> None:
    code, out, err = call("explain")
    assert (code, err) == (0, "")
    assert "backend cpu (automatic)" in out


KEYS = {"backend", "selected_by", "digest", "contract", "facts", "ops", "lowerings", "candidates"}


@pytest.mark.parametrize("by", ["argument", "environment", "recipe", "automatic"])
def test_explain_as_json(call: Call, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    sections: dict[str, Any] = {"backend": {"name": "cpu"}} if by == "recipe" else {}
    recipe = cli.write_recipe(tmp_path / "recipe.yaml", store, **sections)
    if by == "environment":
        monkeypatch.setenv("ACCELBRIDGE_BACKEND", "cpu")
    code, out, err = call("explain", str(recipe), "--json", "--nproc=2", *(["--backend=cpu"] * (by == "argument")))
    assert (code, err) == (0, "")
    plan = json.loads(out)
    assert set(plan) >= KEYS
    assert (plan["backend"], plan["selected_by"]) == ("cpu", by)
    for op in plan["ops"]:
        assert set(op) >= {"op", "implementation", "dtypes", "support", "evidence", "rejected"}
        assert all(set(r) == {"implementation", "reason"} and r["reason"] for r in op["rejected"])
    assert {"attention", "linear", "all_gather"} <= {op["op"] for op in plan["ops"]}
    assert all(set(c) >= {"name", "available", "reason"} for c in plan["candidates"])
    assert not (tmp_path / "run-recipe").exists(), "explain starts and writes nothing"


def test_explain_counts_devices_as_train_does(call: Call, recipe: Path) -> None:
    for overrides, size in (
        ([], 1),
        (["--set=parallel.dp_shard=4"], 4),
        (["--set=parallel.dp_replicate=2"], 2),
        (["--set=parallel.dp_replicate=2", "--set=parallel.dp_shard=2"], 4),
        (["--nproc=2"], 2),
    ):
        code, out, err = call("explain", str(recipe), "--json", *overrides)
        assert code == 0, err
        assert json.loads(out)["contract"]["world_size"] == size


def test_explain_has_the_digest_of_the_run(call: Call, recipe: Path) -> None:
    plan = prepare(TrainConfig.load(recipe), world_from_environment()).plan
    assert json.loads(call("explain", str(recipe), "--json")[1])["digest"] == plan.digest


def test_explain_does_not_need_the_data(call: Call, recipe: Path, tmp_path: Path) -> None:
    code, out, _ = call("explain", str(recipe), f"--set=data.train={tmp_path / 'later'}")
    assert code == 0
    assert "is not there yet: the digest is without it" in " ".join(out.split())


def test_explain_does_not_mind_a_finished_run(call: Call, recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "run-recipe"
    output.mkdir()
    (output / "metrics.jsonl").write_text("{}\n")
    assert call("explain", str(recipe))[0] == 0
    assert [path.name for path in output.iterdir()] == ["metrics.jsonl"]


# --------------------------------------------------------------------------------------------------- text

LONG = "this kernel takes a head dimension of at most 128 and none of the masks that this run asks for, " * 3
PATH = "/a/path/that/is/far/too/long/for/one/line/but/must/not/be/broken/" + "x" * 60


@pytest.fixture
def plan(recipe: Path) -> ExecutionPlan:
    """A plan with everything that can be long in it."""
    plan = prepare(TrainConfig.load(recipe), world_from_environment()).plan
    choice = OpChoice(
        "attention", "flash_deterministic", {"compute": "bfloat16"}, "emulated", "measured",
        (Rejected("fused", LONG), Rejected("sdpa", "comes later")), LONG,
    )  # fmt: skip
    lowering = Lowering("float32_reduce", LONG, LONG, LONG)
    notes = ("FALLBACK: attention asked for fused, " + LONG, f"see {PATH}")
    return replace(plan, ops=(choice, *plan.ops), lowerings=(lowering, lowering), notes=notes)


def plain(text: str, width: int) -> None:
    """No colours or boxes, no trailing blanks, and no line beyond ``width`` that could have been broken."""
    assert not re.search(r"[\x1b\u2500-\u257f]", text)
    for line in text.splitlines():
        assert line == line.rstrip()
        assert len(line) <= width or PATH in line, line


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("details", [False, True])
def test_a_plan_fits_the_terminal(
    plan: ExecutionPlan, monkeypatch: pytest.MonkeyPatch, width: int, details: bool
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = plan_text(plan, details=details)
    plain(text, width)
    lines = text.splitlines()
    assert lines[0] == f"execution plan {plan.digest}: backend cpu (automatic)"
    row = next(i for i, line in enumerate(lines) if line.startswith("  attention  "))
    assert lines[row].split() == ["attention", "flash_deterministic", "bfloat16", "emulated", "measured"]
    assert lines[row + 1].startswith("    this kernel takes")
    joined = " ".join(text.split())
    assert "not fused: this kernel takes a head dimension" in joined
    assert "FALLBACK: attention asked for fused" in joined
    assert f"see {PATH}" in joined
    assert (f"lowering float32_reduce: {LONG.strip()} ->" in joined) is details


def test_the_plan_of_a_run_is_compact(recipe: Path) -> None:
    plan = prepare(TrainConfig.load(recipe), world_from_environment()).plan
    assert len(plan_text(plan).splitlines()) <= 2 * len(plan.ops)


@pytest.mark.parametrize("width", [80, 120])
def test_devices_fit_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    devices = tuple(DeviceInfo(index, "Chip 9000 PCIe") for index in range(8))
    text = devices_text(
        [
            Candidate("works", "accelbridge-works", "1.2.3", "1.0", Probe(True, "8 chips", devices)),
            Candidate("broken", "accelbridge-broken", "0.1", probe=Probe(False, f"{LONG} {PATH}")),
        ]
    )
    plain(text, width)
    lines = text.splitlines()
    assert lines[1].split("  ")[0] == "works"
    assert "8 x Chip 9000 PCIe" in lines[1]
    assert lines[2] == "  8 chips"
    assert "no" in lines[3].split()
    assert PATH in " ".join(lines[4:])


def test_a_pipe_gets_plain_text(recipe: Path) -> None:
    done = cli.run("explain", str(recipe), "--nproc", "2", FORCE_COLOR="1", TERM="xterm-256color")
    assert done.returncode == 0, done.stderr
    plain(done.stdout, 120)
