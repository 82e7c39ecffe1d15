"""The controlling side: loops in processes of their own that take turns, and what their turns say."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from gate import CONTROL

RANKS = 2
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
"""For every loop. glibc otherwise moves these thresholds while it runs, and how often a step's tensors are mapped anew
(3000 to 7000 page faults a step; so, 300 to 600) is luck of the process, not of what is measured."""
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Block:
    """One turn: processor seconds per step of all ranks together, and seconds on the clock."""

    cpu: float
    wall: float
    cpu_steps: tuple[float, ...]
    """Processor seconds of each step, of all ranks together."""


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of paired turns, with an interval that covers the true median with 95 % or more."""

    median: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
        """Ratios of ``ours`` over ``theirs``, turn by turn.

        The interval is that of order statistics (sign test): it asks nothing of the distribution. With fewer than 6
        pairs there is none of 95 %, and it is the smallest and the greatest.
        """
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        n, skip, tail = len(ratios), 0, 2.0 ** -len(ratios)
        while 2 * (tail + math.comb(n, skip + 1) * 2.0**-n) <= 0.05:
            skip += 1
            tail += math.comb(n, skip) * 2.0**-n
        return cls(statistics.median(ratios), ratios[skip], ratios[n - 1 - skip], n)

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def judged(self, target: float) -> dict[str, Any]:
        """As data, with ``target`` and the verdict."""
        return {**asdict(self), "target": target, "verdict": self.verdict(target)}

    def verdict(self, target: float) -> str:
        """PASS or FAIL where the whole interval lies on one side of ``target``, and otherwise that it does not."""
        if self.high <= target:
            return "PASS"
        return "within the spread" if self.low <= target else "FAIL"


class ArmFailed(Exception):
    """A loop ended early; the message has the end of its log."""


class Arm:
    """One loop on ``ranks`` processes of one thread each. A context manager: its end ends the processes."""

    def __init__(
        self,
        name: str,
        script: str,
        case: Mapping[str, Any],
        python: str,
        env: Mapping[str, str] | None = None,
        ranks: int = RANKS,
    ) -> None:
        self.name = name
        self._ranks = ranks
        self.blocks: list[Block] = []
        self.peak_rss: list[int] = []
        self.tensor_bytes: tuple[int, ...] = ()
        self._folder = Path(case["folder"]) / name
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "case.json"
        path.write_text(json.dumps({**case, "output": str(self._folder / "output")}))
        self._command = [python, str(HERE / script), str(path)]
        self._env = dict(env or {})
        self._processes: list[subprocess.Popen[bytes]] = []
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._pipes = [self._start(rank, port) for rank in range(self._ranks)]
        return self

    def _start(self, rank: int, port: int) -> tuple[Any, Any]:
        (their_read, write), (read, their_write) = os.pipe(), os.pipe()
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self._ranks, "LOCAL_WORLD_SIZE": self._ranks}
        env = os.environ | {name: str(value) for name, value in ranks.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, CONTROL: f"{their_read},{their_write}"}
        env |= ALLOCATOR | self._env
        log = self._resources.enter_context((self._folder / f"rank{rank}.log").open("wb"))
        process = subprocess.Popen(
            self._command, env=env, stdout=log, stderr=subprocess.STDOUT, pass_fds=(their_read, their_write)
        )
        self._processes.append(process)
        os.close(their_read)
        os.close(their_write)
        return self._resources.enter_context(os.fdopen(read)), self._resources.enter_context(os.fdopen(write, "w"))

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        with suppress(BrokenPipeError):  # one that died has left a command unread
            self._resources.close()

    def tell(self, command: str) -> None:
        """Start the next steps: "run N", "memory N" or "profile N WHERE"."""
        for _, write in self._pipes:
            try:
                write.write(command + "\n")
                write.flush()
            except BrokenPipeError:
                self._failed()

    def hear(self) -> list[dict[str, Any]]:
        """What each rank says at the end of a turn."""
        lines = [read.readline() for read, _ in self._pipes]
        if not all(lines):
            self._failed()
        return [json.loads(line) for line in lines]

    def _failed(self) -> None:
        for process in self._processes:
            process.kill()
        text = "\n".join((self._folder / f"rank{rank}.log").read_text(errors="replace") for rank in range(self._ranks))
        raise ArmFailed(f"{self.name}: {text[-2500:]}")

    def turn(self, steps: int, keep: bool = True) -> None:
        """Run ``steps`` steps and remember what they took."""
        self.tell(f"run {steps}")
        said = self.hear()
        if keep:
            cpu, wall = sum(s["cpu"] for s in said) / steps, max(s["wall"] for s in said) / steps
            each = tuple(map(sum, zip(*(s["cpu_steps"] for s in said), strict=True)))
            self.blocks.append(Block(cpu, wall, each))
            self.peak_rss = [s["peak_rss"] for s in said]

    def memory(self) -> None:
        """Run one more step, and remember the bytes of tensors, mean of the ranks: (between steps, at most)."""
        self.tell("memory 1")
        said = self.hear()
        self.tensor_bytes = tuple(sum(s[key] for s in said) // self._ranks for key in ("resident_bytes", "peak_bytes"))

    def losses(self) -> list[float]:
        """Run to the end; the losses of all steps, as rank 0 has them."""
        self.tell("run 1000000")
        return self.hear()[0]["losses"]


def joined(arms: Sequence[Arm]) -> Arm:
    """The turns and the peaks of several runs of one side as those of one: where its memory happens to lie makes a
    process faster or slower for as long as it lives."""
    first = arms[0]
    first.blocks = [block for arm in arms for block in arm.blocks]
    first.peak_rss = [peak for arm in arms for peak in arm.peak_rss]
    return first


def take_turns(arms: Sequence[Arm], turns: int, steps: int) -> None:
    """Each arm has ``turns`` turns of ``steps`` steps, one after the other, the order reversed every time, so that a
    machine that slows down or speeds up favours none."""
    for turn in range(turns):
        for arm in arms if turn % 2 == 0 else reversed(arms):
            arm.turn(steps)


def total_steps(turns: int, steps: int, warmup: int, profile: int = 0) -> int:
    """Steps of a whole run: the turns, one for the memory, and one in which nothing is measured (a last step may
    save)."""
    return warmup + turns * steps + 1 + profile + 1


def costs(arm: Arm) -> dict[str, Any]:
    """Everything that is kept of an arm."""
    return {
        "blocks": [{"cpu": round(block.cpu, 6), "wall": round(block.wall, 6)} for block in arm.blocks],
        "cpu_ms_per_quiet_step": round(1000 * quiet(arm), 2),
        "cpu_ms_per_step": round(1000 * statistics.median(b.cpu for b in arm.blocks), 2),
        "wall_ms_per_step": round(1000 * statistics.median(b.wall for b in arm.blocks), 2),
        "peak_rss_bytes": arm.peak_rss,
        "tensor_bytes": {"between_steps": arm.tensor_bytes[0], "peak": arm.tensor_bytes[1]},
    }


def cpu_ratio(ours: Arm, theirs: Arm) -> Ratio:
    return Ratio.of([b.cpu for b in ours.blocks], [b.cpu for b in theirs.blocks])


def quiet(arm: Arm) -> float:
    """Processor seconds per step as if nothing had disturbed: for each step of a turn the least over all turns."""
    return statistics.mean(map(min, zip(*(block.cpu_steps for block in arm.blocks), strict=True)))


def quiet_ratio(ours: Arm, theirs: Arm) -> float:
    """Of :func:`quiet`. On a busy machine, where turns scatter widely, it says more than the median; no interval."""
    return quiet(ours) / quiet(theirs)


def wall_ratio(ours: Arm, theirs: Arm) -> Ratio:
    return Ratio.of([b.wall for b in ours.blocks], [b.wall for b in theirs.blocks])


def memory_ratios(ours: Arm, theirs: Arm) -> dict[str, float]:
    """Peak resident size, and bytes of tensors between steps and at most; after :meth:`Arm.memory`."""
    pairs = zip(ours.tensor_bytes, theirs.tensor_bytes, strict=True)
    between, peak = (mine / other for mine, other in pairs)
    rss = statistics.mean(ours.peak_rss) / statistics.mean(theirs.peak_rss)
    return {"peak_rss": rss, "tensors_between_steps": between, "tensors_peak": peak}


def row(*cells: object) -> str:
    """A line of a markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*names: str) -> str:
    """The first two lines of one."""
    return row(*names) + "\n" + row(*("---" for _ in names))


def greatest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of the losses, relative, over the steps that both have."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def end_on_sigterm() -> None:
    """Let SIGTERM end the program as an exception does: processes and folders go with it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


def machine() -> dict[str, Any]:
    """What the figures depend on. The load average tells whether the machine was idle."""
    import torch

    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ranks": RANKS,
        "threads_per_rank": 1,
        "load_average_1_min_before": round(os.getloadavg()[0], 2),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def write(out: Path, stem: str, result: Mapping[str, Any], title: str, table: str, facts: Mapping[str, Any]) -> None:
    """``OUT/STEM.json`` and ``OUT/STEM.md``."""
    where = ", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items())
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / f"{stem}.md").write_text(f"{title}\n\n{table}\n\n{where}\n")
