"""Metrics of a run: kept on the device, read at intervals, written as one JSON line per step.

``OUTPUT/metrics.jsonl`` holds two kinds of lines, both strict JSON (RFC 8259: no NaN or Infinity literals;
a value that isn't finite is the text ``"nan"``, ``"inf"`` or ``"-inf"``, which ``float()`` reads back):

- step lines: ``step`` (optimizer updates done, from 1), ``time`` (Unix seconds when the host finished the
  step), ``loss``, ``grad_norm``, ``lr``, ``tokens`` (of the whole step, over all ranks), ``step_time``
  (seconds, host), its parts ``time_data``, ``time_forward``, ... (see ``accelbridge.train.step_times``),
  ``time_wait``, ``tokens_per_second``, ``mfu`` (0..1, or ``"unknown"``), and what else the trainer records;
- event lines: ``event`` (``start``, ``evaluation``, ``checkpoint``, ...) and the ``step`` it came after.

There is exactly one line per step, also after any number of crashes and resumes. Steps and events are written
at different moments, so a reader goes by ``step``, not by the order of lines. Importing this loads no torch.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from accelbridge.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.tensorboard import SummaryWriter

    from accelbridge.train.metrics_config import MetricsConfig

Scalar: TypeAlias = "Tensor | float | int"
"""A number on the host, or a tensor of one element anywhere."""

METRICS_FILE = "metrics.jsonl"
UNKNOWN = "unknown"
STOPPED_EVENT = "stopped"
"""Event of a run that ended early on SIGTERM, after its checkpoint was published."""
FINISHED_EVENT = "finished"
"""Event of a run that did all its steps."""
PASSED_OVER_EVENT = "passed_over"
"""Event of a checkpoint that could not be used: ``checkpoint``, ``fault`` and the name it was ``renamed`` to."""
HALTED_EVENT = "halted"
"""Event of a run that a guard stopped: ``cause`` (nonfinite, spike) and ``message``."""
ROLLBACK_EVENT = "rollback"
"""Event of a run that went back to a checkpoint: to ``step``, because of the loss of step ``spike``."""
HISTORY = ("start", "resume", "restart", PASSED_OVER_EVENT, HALTED_EVENT, ROLLBACK_EVENT)
"""Events that stay in the file when steps are done again: they tell what happened, not what was computed."""

_COMPUTED = frozenset({"event", "time", "tokens_per_second", "mfu", "time_wait"})
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunFacts:
    """What is known of a run before its first step; written with the ``start`` event."""

    parameters: int
    """Parameters of the whole model."""
    flops_per_token: float | None
    """Model FLOP of forward and backward for one token (no recomputation); None if the model doesn't say."""
    peak_flops: float | None
    """Peak FLOP/s of all devices of the run together; None if any of them is unknown."""
    total_steps: int
    """Optimizer updates after which the run is complete."""
    tokens_per_step: int | None = None
    """Nominal tokens of a step over all ranks, for readers; the measured count is in the step lines."""


class Metrics:
    """Collects the values of each step and reads them together at intervals.

    Call order: ``record`` after each step, ``flush`` when ``due``, and ``flush`` also before anything that
    isn't a step (evaluation, a checkpoint, the end): otherwise the device would finish queued steps in time
    that nobody counts, and a checkpoint could outlive the lines of the steps that it contains.

    All ranks may (and should) make the same calls: each gets the same losses, so a decision taken on them is
    the same everywhere. Only rank 0 writes files.

    Raises ``ConfigError`` on every rank if TensorBoard is asked for and not installed.
    """

    def __init__(self, output_dir: Path, config: MetricsConfig, facts: RunFacts, *, rank: int, start_step: int) -> None:
        self._facts = facts
        self._output, self._tensorboard = output_dir, config.tensorboard
        self._interval = config.interval
        self._pending: list[dict[str, Any]] = []
        self._last_step = start_step
        self._writer: _Writer | None = None
        if config.tensorboard:
            _require_tensorboard()  # on every rank: one that raises alone would leave the others waiting
        if rank == 0:
            self._writer = _Writer(output_dir, start_step, config.tensorboard)
            self.event("start", step=start_step, **asdict(facts))

    def record(
        self,
        step: int,
        *,
        loss: Scalar,
        grad_norm: Scalar,
        tokens: Scalar,
        lr: float,
        step_time: float,
        **extra: Scalar | str | None,
    ) -> None:
        """Keep the values of step number ``step``; never waits for the device.

        ``tokens`` are those of the whole step over all ranks. ``step_time`` is in seconds on the host: from
        before the batch is fetched until the update has been issued, without ``flush``, evaluation or
        checkpoints. ``extra`` becomes further keys of the line.
        """
        assert step > self._last_step, f"step {step} recorded after step {self._last_step}"
        assert not (clash := _COMPUTED & extra.keys()), f"{sorted(clash)} are written by Metrics itself"
        self._last_step = step
        values = {"loss": loss, "grad_norm": grad_norm, "lr": lr, "tokens": tokens, "step_time": step_time}
        kept = {name: _keep(value) for name, value in (values | extra).items()}
        self._pending.append({"step": step, "time": round(time.time(), 3), **kept})

    def due(self, step: int) -> bool:
        """Whether to flush after ``step``: at each multiple of the interval, and at the run's last step."""
        return step % self._interval == 0 or step >= self._facts.total_steps

    def flush(self, read_sums: Callable[[Sequence[Tensor]], list[float]] | None = None) -> list[dict[str, Any]]:
        """Wait for the device, write one line per pending step and return these lines, oldest first.

        ``read_sums`` adds the losses of all steps up over the replicas, where each rank has recorded its share:
        one reduction for the whole interval, in which every rank has to take part.

        In what is returned, values that aren't finite are ordinary floats (the texts are only in the file).

        Throughput: a device that works asynchronously lets the host run ahead, so a single ``step_time`` says
        when work was queued, not how long it took. Reading the values waits until all of it is done.
        Therefore each line gets the mean of its interval: tokens of all pending steps / (their ``step_time``
        + the time this read waited). The device is idle at both ends, which makes that the true rate;
        compilation and slow data are in it, evaluation and checkpoints are not.
        """
        pending, self._pending = self._pending, []
        if not pending:
            return []
        began = time.perf_counter()
        if read_sums is not None:
            losses = read_sums([line["loss"] for line in pending])
            pending = [{**line, "loss": loss} for line, loss in zip(pending, losses, strict=True)]
        lines = [{name: _read(value) for name, value in line.items()} for line in pending]
        waited = time.perf_counter() - began
        self._add_rates(lines, waited)
        if self._writer is not None:
            self._writer.write(lines)
        return lines

    def event(self, kind: str, **fields: Scalar | str | Mapping[str, Any] | None) -> None:
        """Write ``{"event": kind, ...}`` at once (rank 0). ``fields`` should hold ``step``; tensors are read.

        ``accelbridge report`` draws ``evaluation`` (step, loss) and counts ``start``, which the constructor
        writes. Pending steps are not written here: see the class's call order.
        """
        if self._writer is not None:
            self._writer.write([{"event": kind, **{name: _read(value) for name, value in fields.items()}}])

    def rewind(self, step: int) -> None:
        """Take back the lines of steps after ``step``, at least 1, which are to be done again with other data."""
        self._pending.clear()
        self._last_step = step
        if self._writer is not None:
            self._writer.close()
            self._writer = _Writer(self._output, step, self._tensorboard)

    def close(self) -> None:
        """Close the files; safe to call twice. Doesn't touch the device, where a read could hang after a
        failure: steps not flushed are not written."""
        self._pending.clear()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add_rates(self, lines: list[dict[str, Any]], waited: float) -> None:
        seconds = sum(line["step_time"] for line in lines) + waited
        rate = sum(line["tokens"] for line in lines) / seconds
        per_token, peak = self._facts.flops_per_token, self._facts.peak_flops
        mfu = UNKNOWN if per_token is None or peak is None else per_token * rate / peak
        for line in lines:
            line |= {"time_wait": round(waited / len(lines), 6), "tokens_per_second": rate, "mfu": mfu}


# --------------------------------------------------------------------------------------------- device scalars


def _keep(value: Any) -> Any:
    """Without its graph, which a loss would keep. It is no copy: :meth:`Execution.end_step` has made what lasts."""
    return value.detach() if hasattr(value, "detach") else value


def _read(value: Any) -> Any:
    """The Python number behind a scalar; waits for the device if it lies there."""
    return value.item() if hasattr(value, "item") else value


# ------------------------------------------------------------------------------------------------------ files


class _Writer:
    """``metrics.jsonl`` and, if asked, the TensorBoard files, on rank 0."""

    def __init__(self, output_dir: Path, start_step: int, tensorboard: bool) -> None:
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir / METRICS_FILE
        _prepare(path, start_step)
        self._board = _open_tensorboard(output_dir / "tensorboard", start_step) if tensorboard else None
        self._file = path.open("ab")

    def write(self, lines: list[dict[str, Any]]) -> None:
        # One write and one flush: a killed process leaves at most one torn line, which the next one removes.
        self._file.write(b"".join(_encode(line) for line in lines))
        self._file.flush()
        if self._board is not None:
            _mirror(self._board, lines)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _encode(line: dict[str, Any]) -> bytes:
    return json.dumps({name: _strict(value) for name, value in line.items()}, allow_nan=False).encode() + b"\n"


def _strict(value: Any) -> Any:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def parse_line(raw: bytes) -> dict[str, Any] | None:
    """The object in one line of ``metrics.jsonl``; None if it is torn, or neither a step nor an event."""
    try:
        line = json.loads(raw)
    except ValueError:  # also covers bytes that aren't UTF-8
        return None
    if not isinstance(line, dict):
        return None
    if "event" in line:
        return line if isinstance(line["event"], str) else None
    return line if type(line.get("step")) is int else None


def last_event(output_dir: Path) -> str | None:
    """The kind of the event in the last line of a run's metrics; None for a step line, or without a file."""
    path = output_dir / METRICS_FILE
    lines = path.read_bytes().splitlines() if path.exists() else []
    line = parse_line(lines[-1]) if lines else None
    return line.get("event") if line else None


def _prepare(path: Path, start_step: int) -> None:
    """Make an existing file ready for lines of the steps after ``start_step``."""
    if not path.exists() or not path.stat().st_size:
        return
    if start_step == 0:  # another run's lines, or steps that no checkpoint kept: out of the way, never deleted
        path.rename(next(p for n in count(1) if not (p := path.with_name(f"metrics.{n}.jsonl")).exists()))
        return
    before = path.read_bytes()
    after = b"".join(_kept(before, start_step))
    if after != before:
        _replace(path, after)


def _kept(data: bytes, start_step: int) -> Iterator[bytes]:
    """The whole lines of ``data`` that stay true when the run goes on after ``start_step``."""
    damaged = 0
    for raw in data.splitlines():
        line = parse_line(raw)
        if line is None:
            damaged += 1
        elif line.get("event") in HISTORY or _step_of(line) <= start_step:
            yield raw + b"\n"
    if damaged:
        _log.warning("%s: left out %d damaged line(s) of an interrupted run", METRICS_FILE, damaged)


def _step_of(line: dict[str, Any]) -> float:
    """The line's step; an event without one belongs to no step and is always kept."""
    step = line.get("step")
    return step if isinstance(step, int | float) else -math.inf


def _replace(path: Path, data: bytes) -> None:
    """Put ``data`` in the place of ``path``: whole or, after a crash, not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


# ------------------------------------------------------------------------------------------------ tensorboard


def _require_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise ConfigError(
            "metrics.tensorboard is true, but the package tensorboard is not installed: "
            "run pip install 'accelbridge[tensorboard]', or set metrics.tensorboard to false"
        )


def _open_tensorboard(directory: Path, start_step: int) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides older points of steps that this process does (again)
    return SummaryWriter(str(directory), purge_step=start_step + 1)


def _mirror(board: SummaryWriter, lines: list[dict[str, Any]]) -> None:
    """Numbers of step lines as ``train/NAME``, those of events as ``EVENT/NAME``."""
    for line in lines:
        kind = line.get("event", "train")
        if kind in HISTORY or "step" not in line:
            continue
        for name, value in line.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                board.add_scalar(f"{kind}/{name}", value, line["step"], walltime=line.get("time"))
    board.flush()
