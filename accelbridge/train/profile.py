"""``metrics.profile``: chosen steps recorded by torch.profiler, one Chrome trace per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.profiler import profile, supported_activities

if TYPE_CHECKING:
    from accelbridge.train.trainer import Trainer

FOLDER = "profile"
_COLLECTIVE = ("c10d::", "gloo:", "nccl:", "xccl:", "hccl:")
"""How torch names what a process group did (torch/csrc/distributed/c10d: ops by their dispatcher name, work by its
library)."""


class StepProfiler:
    """Records the steps of one range, whole: waiting for their data, the step, and what follows it.

    The trace is ``OUTPUT/profile/steps_FIRST-LAST.rank_N.json``, for chrome://tracing or Perfetto. Host and, where
    torch knows its profiler, the device are in it. Recording slows a step down, so its times are no benchmark.
    """

    def __init__(self, trainer: Trainer, steps: range) -> None:
        prepared = trainer.prepared
        name = f"steps_{steps.start}-{steps.stop - 1}.rank_{prepared.world.rank}.json"
        self._path = prepared.output / FOLDER / name
        self._trainer = trainer
        self._steps = steps
        self._recording: profile | None = None
        if steps and steps.start <= trainer.step:
            trainer.progress.print(f"metrics.profile begins at step {steps.start}, which is done: nothing is recorded")
        self.after(trainer.step)

    def after(self, step: int) -> None:
        """``step`` is done: begin before the first of the range, write after its last."""
        if not self._steps:
            return
        if step + 1 == self._steps.start and self._recording is None:
            self._synchronize()  # what was queued before is not of these steps
            self._recording = profile(activities=supported_activities())
            self._recording.start()
        elif self._recording is not None and step + 1 >= self._steps.stop:
            self._write(step, self._recording)

    def _write(self, step: int, recording: profile) -> None:
        self._synchronize()
        recording.stop()
        self._recording = None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(str(self._path))
        seconds = round(_collective_seconds(recording), 6)
        self._trainer.metrics.event("profile", step=step, path=str(self._path), collective_seconds=seconds)
        self._trainer.progress.print(f"profile: {self._path}")

    def _synchronize(self) -> None:
        self._trainer.prepared.target.backend.device.synchronize()

    def close(self) -> None:
        """Drop what is being recorded, if the run ends within the range. Safe to call again."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None


def _collective_seconds(recording: profile) -> float:
    """Host seconds within collectives, of all threads: how long their work was in flight where the library reports it,
    else how long issuing them took."""
    by_kind: dict[str, float] = {}
    for event in recording.events() or []:
        if event.name.startswith(_COLLECTIVE):
            kind = event.name.partition(":")[0]
            by_kind[kind] = by_kind.get(kind, 0.0) + event.time_range.elapsed_us() / 1e6
    work = [seconds for kind, seconds in by_kind.items() if kind != "c10d"]
    return max(work, default=by_kind.get("c10d", 0.0))
