"""The Trainer beside other trainers: ``python benchmarks/peers.py --setup DIR`` once, then ``--envs DIR``.

All train the model of bare_loop.py on the same batches from the same initial values, on two CPU ranks of one thread
each, over gloo; every file in peers/ shows what differs from the loop by hand. See README.md for how to read it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arms import (
    HERE,
    Arm,
    ArmFailed,
    costs,
    cpu_ratio,
    end_on_sigterm,
    greatest_difference,
    head,
    joined,
    machine,
    memory_ratios,
    quiet_ratio,
    row,
    take_turns,
    total_steps,
    wall_ratio,
    write,
)
from cases import SIZES, make_case

ENVIRONMENTS = {
    "accelerate": ["accelerate==1.15.0"],
    "fabric": ["lightning-fabric==2.6.6"],
    "torchtitan": ["torchtitan==0.2.2"],
    "deepspeed": ["deepspeed==0.19.8", "ninja"],
}
"""What is installed beside torch (of constraints.txt) and numpy, in a virtual environment each."""
OURS = "accelbridge"
TARGET = 1.0
"""Processor time of ours over a peer's."""
COMPARED = 10
"""Steps whose losses are compared. Later ones drift apart, since sums are taken in another order."""


@dataclass(frozen=True)
class Peer:
    """A loop that is not ours."""

    name: str
    script: str
    environment: str | None = None
    """None: that of this process."""


FSDP2 = Peer("FSDP2 by hand", "bare_loop.py")
DEEPSPEED = Peer("DeepSpeed", "peers/deepspeed_loop.py", "deepspeed")
REPLICATE = {"dp_replicate": 2, "dp_shard": 1}


@dataclass(frozen=True)
class Group:
    """Loops that do the same work in the same layout."""

    parallel: Mapping[str, Any]
    peers: tuple[Peer, ...]
    compute: str = "float32"
    same: float = 1e-5
    """Relative difference of losses beyond which a peer does other work, and is not compared."""


GROUPS = {
    "replicate": Group(
        REPLICATE,
        (
            Peer("DDP by hand", "peers/ddp_loop.py"),
            Peer("Accelerate DDP", "peers/accelerate_loop.py", "accelerate"),
            Peer("Fabric DDP", "peers/fabric_loop.py", "fabric"),
        ),
    ),
    "zero3": Group(
        {"zero": 3},
        (
            FSDP2,
            Peer("Fabric FSDP2", "peers/fabric_loop.py", "fabric"),
            Peer("torchtitan", "peers/torchtitan_loop.py", "torchtitan"),
            DEEPSPEED,
        ),
    ),
    "zero1": Group({"zero": 1}, (DEEPSPEED,)),
    "zero2": Group({"zero": 2}, (DEEPSPEED,)),
    "zero3-bf16": Group({"zero": 3}, (FSDP2, DEEPSPEED), compute="bfloat16", same=5e-3),
}


def setup(where: Path) -> None:
    """Make the environments that are not there yet."""
    for name, packages in ENVIRONMENTS.items():
        if not (where / name).exists():
            print(f"installing {name}", flush=True)
            venv.create(where / name, with_pip=True)
            pip = [_python(where, name), "-m", "pip", "install", "--quiet", "-c", str(HERE.parent / "constraints.txt")]
            subprocess.run([*pip, "torch", "numpy", *packages], check=True)

    compile_ahead = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()"
    subprocess.run([_python(where, "deepspeed"), "-c", compile_ahead], env=os.environ | _deepspeed(where), check=True)


def _deepspeed(where: Path) -> dict[str, str]:
    """What it compiles lies with its environment."""
    return {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(where.absolute() / "extensions")}


def _python(where: Path, name: str) -> str:
    return str(where.absolute() / name / "bin" / "python")


def measure(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One group."""
    group = GROUPS[name]
    turns = options.turns // options.pairs
    steps = total_steps(turns, options.steps, options.warmup)
    failures: dict[str, str] = {}
    starts: dict[str, list[Arm]] = {}
    losses: dict[str, list[list[float]]] = {}
    for number in range(options.pairs):
        case = make_case(
            folder / f"{name}-{number}",
            SIZES[options.size],
            steps,
            parallel=group.parallel,
            compute=group.compute,
            layout=name,
            own_model=False,
            weight_decay=0.0,  # torchtitan would decay norms as well
        )
        for arm, values in _start(group, case, turns, options, failures):
            starts.setdefault(arm.name, []).append(arm)
            losses.setdefault(arm.name, []).append(values[:COMPARED])
    arms = {each: joined(same) for each, same in starts.items() if each not in failures}
    ours, first = arms.pop(OURS), losses[OURS]
    results = []
    for arm in arms.values():
        difference = max(map(greatest_difference, first, losses[arm.name]))
        if difference > group.same:
            failures[arm.name] = f"its losses of {COMPARED} steps differ by {difference:.1e}: it does other work"
        else:
            results.append(_compare(name, ours, arm, losses[arm.name][0][-1], difference))
    mine = {"last_loss": first[0][-1], **costs(ours)}
    return {"group": name, "compute": group.compute, "accelbridge": mine, "peers": results, "failures": failures}


def _start(
    group: Group, case: dict[str, Any], turns: int, options: argparse.Namespace, failures: dict[str, str]
) -> list[tuple[Arm, list[float]]]:
    """All loops of a group in new processes, which take ``turns`` turns each; what was measured, and all losses."""
    with ExitStack() as stack:
        ours = stack.enter_context(Arm(OURS, "ours.py", case, sys.executable))
        ours.turn(options.warmup, keep=False)
        arms = [ours, *_running(group, case, options, stack, failures)]
        take_turns(arms, turns, options.steps)
        for arm in arms:
            arm.memory()
        return [(arm, arm.losses()) for arm in arms]


def _compare(name: str, ours: Arm, peer: Arm, loss: float, difference: float) -> dict[str, Any]:
    cpu, wall, memory = cpu_ratio(ours, peer), wall_ratio(ours, peer), memory_ratios(ours, peer)
    ratios = (
        cpu,
        cpu.verdict(TARGET),
        f"{quiet_ratio(ours, peer):.3f}",
        wall,
        f"{memory['peak_rss']:.3f}",
        f"{memory['tensors_peak']:.3f}",
    )
    return {
        "peer": peer.name,
        "cpu_ratio": cpu.judged(TARGET),
        "cpu_ratio_of_quiet_steps": quiet_ratio(ours, peer),
        "wall_ratio": asdict(wall),
        "memory_ratios": memory,
        f"loss_of_step_{COMPARED}": loss,
        "greatest_loss_difference": difference,
        **costs(peer),
        "row": row(name, peer.name, *ratios, f"{loss:.7f}", f"{difference:.0e}", costs(peer)["cpu_ms_per_quiet_step"]),
    }


def _running(
    group: Group, case: dict[str, Any], options: argparse.Namespace, stack: ExitStack, failures: dict[str, str]
) -> Iterator[Arm]:
    """The peers that start and warm up; why the others do not is put into ``failures``."""
    for peer in group.peers:
        if peer.name in failures:
            continue
        python = sys.executable if peer.environment is None else _python(options.envs, peer.environment)
        env = _deepspeed(options.envs) if peer.environment == "deepspeed" else {}
        if not Path(python).exists():
            failures[peer.name] = f"no environment; run {HERE.name}/peers.py --setup {options.envs}"
            continue
        with ExitStack() as trial:
            try:
                arm = trial.enter_context(Arm(peer.name, peer.script, case, python, env))
                arm.turn(options.warmup, keep=False)
            except ArmFailed as error:
                failures[peer.name] = str(error)
                continue
            stack.push(trial.pop_all())
            yield arm


HEAD = head(
    "layout",
    "peer",
    "CPU ratio ours/peer [95 %]",
    f"target {TARGET}",
    "CPU ratio of quiet steps",
    "wall ratio [95 %]",
    "peak RSS ratio",
    "tensors at peak, ratio",
    f"loss of step {COMPARED}",
    "losses differ by",
    "peer, CPU ms per quiet step",
)


def main() -> None:
    end_on_sigterm()
    options = _options()
    if options.setup:
        return setup(options.setup)
    began = time.monotonic()
    facts = machine()
    groups: list[dict[str, Any]] = []
    lines = [HEAD]
    print(HEAD)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        for name in options.groups.split(","):
            groups.append(measure(name, Path(folder), options))
            rows = [peer.pop("row") for peer in groups[-1]["peers"]]
            rows += [
                f"| {name} | {peer} | not compared: {_last(text)} |" for peer, text in groups[-1]["failures"].items()
            ]
            print("\n".join(rows), flush=True)
            lines += rows
    table = "\n".join(lines)
    print(f"{time.monotonic() - began:.0f} s; load before: {facts['load_average_1_min_before']}")
    if options.out:
        date = time.strftime("%Y-%m-%d")
        title = (
            f"Trainer beside others, size {options.size}, {date}; {options.turns} turns of {options.steps} steps each, "
            f"in {options.pairs} starts of new processes"
        )
        facts["packages"] = " ".join(package for packages in ENVIRONMENTS.values() for package in packages)
        write(options.out, f"peers-{date}", {"date": date, "machine": facts, "groups": groups}, title, table, facts)


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", type=Path, metavar="DIR", help="make the peers' environments in DIR, and end")
    parser.add_argument("--envs", type=Path, metavar="DIR", default=Path("peers-envs"), help="where they are")
    parser.add_argument("--groups", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--size", default="demo", help=f"of {', '.join(SIZES)}")
    parser.add_argument("--turns", type=int, default=12, help="turns of each in all")
    parser.add_argument("--pairs", type=int, default=4, help="how often all start anew in that time")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the first turn")
    parser.add_argument("--out", type=Path, help=f"folder for the results, for example {HERE.name}/results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
