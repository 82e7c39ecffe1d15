"""Graphs of devices whose torch module is shaped like that of ``torch.accelerator``'s first one: a graph class, the
context ``graph`` that records into it, and streams. A backend names the class."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from accelbridge.backend import Graph


class TorchGraph(Graph):
    """An object of class ``kind`` of ``torch.<device_type>``, recorded on a stream of its own."""

    def __init__(self, device_type: str, kind: str) -> None:
        self._module: Any = torch.get_device_module(device_type)
        self._graph: Any = getattr(self._module, kind)()
        self._stream: Any = self._module.Stream()

    @contextmanager
    def aside(self) -> Iterator[None]:
        here = self._module.current_stream()
        self._stream.wait_stream(here)
        with self._module.stream(self._stream):
            yield
        here.wait_stream(self._stream)

    def record(self, run: Callable[[], None]) -> None:
        # What other threads do meanwhile (the loader, the watch over collectives) is no part of it, and may call what a
        # recording thread must not. The context waits for the device before it begins.
        with self._module.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            run()

    def replay(self) -> None:
        self._graph.replay()
