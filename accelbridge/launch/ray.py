"""A recipe as a Ray Train job: ``python -m accelbridge.launch.ray RECIPE --workers 2 --max-failures 2``.

Ray places the workers and starts them again when one dies; each is a rank of the ordinary Trainer, which makes its own
process group and goes on from its own newest checkpoint. ``output.dir`` and the data must be visible to all nodes, at
the same paths. Importing this imports no Ray.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (an optional dependency; make test-ray has it. Pyright takes this very file for the module ray.)

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from accelbridge.backend import World
from accelbridge.errors import AccelbridgeError, ConfigError
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import choose_target, prepare


@dataclass(frozen=True)
class RayJob:
    """What :func:`fit` runs."""

    recipe: Path
    workers: int
    """Ranks, each a Ray worker."""
    overrides: Sequence[str] = ()
    """``section.name=value``, as ``--set``."""
    max_failures: int = 0
    """How often all workers are started again when one has failed; -1: without end."""
    resources: Mapping[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    """What Ray sets aside for each worker, by Ray's names."""
    backend: str | None = None
    resume: str = "none"
    """As ``accelbridge train --resume``; after a failure it is "auto"."""
    wait_s: float = 60.0
    """Seconds to wait for a cluster that has the resources."""
    address: str | None = None
    """Of the cluster; None: the one in RAY_ADDRESS, else one that is started on this machine."""


def fit(job: RayJob) -> dict[str, Any]:
    """Run ``job`` to its end; returns what it came to: ``step``, ``loss``, ``validation_loss``, ``restarts``.

    Raises ConfigError where Ray is missing, or the number of workers or their resources cannot be had, and what the
    recipe's own checks raise, before a worker is started. What ends a worker comes as the worker's own AccelbridgeError
    if that is what the first one said, else as Ray's ``TrainingFailedError``. Where starting again cannot cure it, the
    workers are started once more only, to find that it is over.
    """
    _check(job)
    config = TrainConfig.load(job.recipe, job.overrides)
    if job.resources.keys() <= {"CPU", "memory"}:  # workers are then such machines as this one
        prepare(
            config,
            World(size=job.workers, local_size=job.workers),
            target=choose_target(config, job.backend),
            resume=job.resume,
        )
    import ray

    # Both are read by Ray in this process: relative paths stay relative to here, and a placement that is not had in
    # time is an error.
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", f"{max(job.wait_s, 1):g}")
    ours = not ray.is_initialized()
    if ours:
        ray.init(address=job.address)
    try:
        _await_resources(ray.cluster_resources, job)
        return _train(job, Path(config.output.dir).expanduser().absolute())
    finally:
        if ours:
            ray.shutdown()


def _check(job: RayJob) -> None:
    if job.workers < 1:
        raise ConfigError(f"--workers {job.workers} asked; a run has at least one; set --workers 1 or more")
    if job.max_failures < -1:
        raise ConfigError(f"--max-failures {job.max_failures} asked; set 0 or more, or -1 for no limit")
    for name, amount in job.resources.items():
        if not amount > 0:
            raise ConfigError(f"--resource {name}={amount:g} asked; set more than 0, or leave {name} away")
    if ("ray" not in sys.modules and find_spec("ray") is None) or sys.modules.get("ray", ...) is None:
        raise ConfigError("Ray asked; the package ray is not installed; run pip install 'accelbridge[ray]'")


def _await_resources(cluster_resources: Any, job: RayJob) -> None:
    """Wait until the cluster as a whole holds what all workers need, which an autoscaler may still add."""
    deadline = time.monotonic() + job.wait_s
    while True:
        there = cluster_resources()
        lacking = {name: each * job.workers for name, each in job.resources.items()}
        lacking = {name: total for name, total in lacking.items() if there.get(name, 0.0) < total}
        if not lacking:
            return
        if time.monotonic() > deadline:
            name, total = next(iter(lacking.items()))
            raise ConfigError(
                f"--workers {job.workers} with {name}={job.resources[name]:g} each asked; the Ray cluster has "
                f"{name}={there.get(name, 0.0):g} of {total:g}, and got no more for {job.wait_s:g} s; "
                "set fewer workers or resources, or add nodes"
            )
        time.sleep(0.5)


def _train(job: RayJob, output: Path) -> dict[str, Any]:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, WorkerGroupError
    from ray.train.torch import TorchTrainer

    from accelbridge.launch import ray_worker

    starts = ray_worker.Starts.remote()
    trainer = TorchTrainer(
        ray_worker.run,
        train_loop_config={
            "recipe": str(job.recipe.absolute()),
            "overrides": list(job.overrides),
            "backend": job.backend,
            "resume": job.resume,
            "folder": os.getcwd(),
            "starts": starts,
        },
        torch_config=ray_worker.NoProcessGroup(),
        scaling_config=ScalingConfig(num_workers=job.workers, resources_per_worker=dict(job.resources)),
        run_config=RunConfig(
            name=output.name,
            storage_path=str(output / "ray"),
            # A placement that is not had in time is tried once more, not for ever.
            failure_config=FailureConfig(max_failures=job.max_failures, controller_failure_limit=1),
            callbacks=[ray_worker.NoteCause(starts)],
        ),
    )
    try:
        trainer.fit()
        result, error = ray.get(starts.outcome.remote())
        if error is not None:
            raise error
        return result
    except TrainingFailedError as error:
        failures = error.worker_failures if isinstance(error, WorkerGroupError) else {}
        ours = [failure for failure in failures.values() if isinstance(failure, AccelbridgeError)]
        raise (ours[0] if ours else error) from error


def _resource(text: str) -> tuple[str, float]:
    name, sign, amount = text.partition("=")
    try:
        return name, float(amount)
    except ValueError:
        what = "no number" if sign else "no ="
        raise ConfigError(f"--resource {text} asked; it has {what}; write NAME=AMOUNT, such as CPU=2") from None


def command(
    recipe: Annotated[Path, typer.Argument(help="A YAML recipe.", metavar="RECIPE")],
    workers: Annotated[int, typer.Option(metavar="N", help="Ranks, each a Ray worker.")],
    max_failures: Annotated[
        int, typer.Option(metavar="N", help="Start all workers again up to N times; -1: without end.")
    ] = 0,
    resource: Annotated[
        list[str] | None,
        typer.Option("--resource", metavar="NAME=AMOUNT", help="For each worker, by Ray's names; default: CPU=1."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a setting of the recipe; repeatable.")
    ] = None,
    backend: Annotated[str | None, typer.Option(metavar="NAME", help="Backend by name.")] = None,
    resume: Annotated[str, typer.Option(metavar="auto|PATH", help="As accelbridge train --resume.")] = "none",
    wait: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="For a cluster that has the resources.")] = 60.0,
    address: Annotated[
        str | None, typer.Option(help="Of the cluster; default: RAY_ADDRESS, else one on this machine.")
    ] = None,
) -> None:
    """Train as RECIPE says, on workers that Ray places."""
    resources = dict(map(_resource, resource or ["CPU=1"]))
    job = RayJob(recipe, workers, overrides or [], max_failures, resources, backend, resume, wait, address)
    last = fit(job)
    typer.echo("done: " + ", ".join(f"{name} {value}" for name, value in last.items() if value is not None))


def main() -> None:
    """Run the command line; an AccelbridgeError becomes its message and exit code, as in ``accelbridge``."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app(prog_name="python -m accelbridge.launch.ray")
    except AccelbridgeError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    # Not the copy of this module that is called __main__: what Ray sends to workers must have a name there.
    from accelbridge.launch import ray as module

    module.main()
