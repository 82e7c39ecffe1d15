"""What a training step does beside running its one graph, each thing told once, in the run's log.

torch_xla counts it (``torch_xla.debug.metrics`` 2.9.0): "CompileTime" has one entry per program compiled,
"TransferFromDeviceTime" one per read by the host, and a counter "aten::NAME" counts the calls of an operation that has
no lowering and so ran on the host. Which line asked for it only torch's dispatcher can tell. It is listened to in the
step after one in which something new was counted, and not before: what is listened to is recorded as another graph,
which is compiled once.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accelbridge_xla.vendor import sdk

_log = logging.getLogger("accelbridge")

SETTLED = 2
"""Steps after which nothing more is compiled: the first, and one whose state lies where the first left it."""


class StepWatch:
    """Follows the steps of one run, from the first microbatch to the end of the step."""

    def __init__(self) -> None:
        self._steps = 0
        self._before: dict[str, int] | None = None
        """Counters at the beginning of the step that is under way."""
        self._listen = False
        """Whether the dispatcher is listened to in this step."""
        self._asked: dict[str, str] = {}
        """The line that first asked for an operation, by "aten::NAME", as far as it was listened to."""
        self._shapes: set[tuple[Any, ...]] = set()
        self._new_shapes = ""
        self._told: set[str] = set()

    def placed(self, batch: Mapping[str, Tensor]) -> None:
        """A batch on its way to the devices: for new shapes a program is compiled."""
        shapes = tuple((name, tuple(x.shape)) for name, x in sorted(batch.items()))
        if shapes not in self._shapes:
            self._shapes.add(shapes)
            self._new_shapes = ", ".join(f"{name} {list(shape)}" for name, shape in shapes)

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Round the passes of microbatch ``index`` of a step."""
        if index == 0:
            self._before = counters()
        if not self._listen:
            yield
            return
        with _Operations() as heard:
            yield
        self._asked |= heard.lines
        for line, operation in heard.reads.items():
            self._told |= {operation, READ}
            self._tell(
                line,
                f"{line} reads a tensor on the host ({operation}), in every step: the step is cut in two there, and "
                "the host waits for the devices; keep the value a tensor, or read it from the metrics",
            )

    def step_done(self) -> None:
        """The step's graph has been cut. Nothing where no step was begun, as in evaluation."""
        before, self._before = self._before, None
        if before is None:
            return
        self._steps += 1
        grown = {name: now - before.get(name, 0) for name, now in counters().items() if now > before.get(name, 0)}
        compiled, new_shapes, self._new_shapes = grown.pop(COMPILED, 0), self._new_shapes, ""
        listened, self._listen = self._listen, False
        if compiled and self._steps > SETTLED and not listened:
            self._compiled(compiled, new_shapes)
        if listened:
            for name, count in grown.items():
                where = f", asked for by {self._asked[name]}" if name in self._asked else ""
                self._tell(name, f"{name} {count} times on the host in step {self._steps} of this run{where}")
        else:
            self._listen = any(name not in self._told for name in grown)

    def _compiled(self, count: int, new_shapes: str) -> None:
        programs = f"step {self._steps} of this run compiled {count} program{'s' * (count > 1)} more"
        if new_shapes:
            self._tell(
                new_shapes,
                f"{programs}, since its batch has shapes not seen before ({new_shapes}; {len(self._shapes)} so far); "
                "pad the data to a few lengths",
            )
            return
        self._tell(
            COMPILED,
            f"{programs}, though its batch has shapes seen before: a shape or a Python number in it changes from step "
            "to step, and each such step waits for the compiler; make the number a tensor (Execution.scalar)",
        )

    def _tell(self, what: str, text: str) -> None:
        if what not in self._told:
            self._told.add(what)
            _log.warning("%s", text)


COMPILED, READ = "compiled", "read by the host"


def counters() -> dict[str, int]:
    """Programs compiled so far, :data:`COMPILED`, reads by the host, :data:`READ`, and calls of operations that ran on
    the host, by "aten::NAME"."""
    metrics = sdk("debug.metrics")
    times = {COMPILED: metrics.metric_data("CompileTime"), READ: metrics.metric_data("TransferFromDeviceTime")}
    fallbacks = {name: metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("aten::")}
    return {name: found[0] if found else 0 for name, found in times.items()} | fallbacks


class _Operations(TorchDispatchMode):
    """Listens to operations on tensors of the devices."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, str] = {}
        """Operation, as "aten::NAME" -> the line that first asked for it."""
        self.reads: dict[str, str] = {}
        """Line that makes the host wait for a tensor -> operation."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if args and isinstance(args[0], Tensor) and args[0].device.type == "xla":
            name = func.name().split(".")[0]
            if name not in self.lines:
                self.lines[name] = _asking_line()
            if _on_host(out):
                self.reads.setdefault(_asking_line(), name)
        return out


def _on_host(out: Any) -> bool:
    """Whether an operation on a device's tensor gave a value to the host: a number, or a tensor there."""
    return out.device.type == "cpu" if isinstance(out, Tensor) else isinstance(out, (bool, int, float))


def _asking_line() -> str:
    """FILE:LINE of the innermost frame that is neither torch's nor ours; of ours, where there is no other."""
    frames = [frame for frame in traceback.extract_stack() if not _within(frame.filename, _VENDORS)]
    users = [frame for frame in frames if not _within(frame.filename, _OURS)]
    chosen = (users or frames)[-1]
    return f"{chosen.filename}:{chosen.lineno}"


def _within(file: str, packages: tuple[str, ...]) -> bool:
    return file.startswith(tuple(f"{sys.modules[name].__path__[0]}/" for name in packages if name in sys.modules))


_VENDORS, _OURS = ("torch", "torch_xla"), ("accelbridge", "accelbridge_xla")
