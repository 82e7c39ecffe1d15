"""``metrics.profile``: chosen steps recorded by torch.profiler, one Chrome trace per rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.profiler import profile, supported_activities

if TYPE_CHECKING:
    from accelbridge.train.trainer import Trainer

FOLDER = "profile"
_ISSUED = "c10d::"
"""How torch names the issuing of a collective (torch/csrc/distributed/c10d/Ops.cpp); its work is named by the library,
as in ``gloo:all_gather``."""


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
        seconds = round(_collective_seconds(recording, self._libraries()), 6)
        self._trainer.metrics.event("profile", step=step, path=str(self._path), collective_seconds=seconds)
        self._trainer.progress.print(f"profile: {self._path}")

    def _libraries(self) -> tuple[str, ...]:
        """Names of the libraries in a fact like ``"gloo"`` or ``"cpu:gloo,acme:acmeccl"``."""
        parts = self._trainer.prepared.target.backend.process_group.split(",")
        return tuple(part.rpartition(":")[2] for part in parts)

    def _synchronize(self) -> None:
        self._trainer.prepared.target.backend.device.synchronize()

    def close(self) -> None:
        """Drop what is being recorded, if the run ends within the range. Safe to call again."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None


def _collective_seconds(recording: profile, libraries: tuple[str, ...]) -> float:
    """Seconds of collectives, of all threads: how long their work was in flight where its library reports it to the
    profiler, else how long issuing it took."""
    issued = worked = 0.0
    for event in recording.events() or []:
        seconds = event.time_range.elapsed_us() / 1e6
        issued += seconds if event.name.startswith(_ISSUED) else 0.0
        worked += seconds if event.name.partition(":")[0] in libraries else 0.0
    return worked or issued
