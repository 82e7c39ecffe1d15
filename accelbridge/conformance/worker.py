"""One rank of the suite: a process that takes tests as lines of JSON and answers each with one.

What a plugin prints goes to the rank's log; the answers have a pipe of their own. A process that dies, or says nothing
in time, is an outcome too: the parent's (``pool.py``).
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from accelbridge.backend import Backend, World
from accelbridge.conformance.status import Status


def main() -> None:
    """``worker.py SETTINGS``: a JSON object with what :func:`accelbridge.conformance.pool.Pool` puts there."""
    faulthandler.enable()
    settings = json.loads(sys.argv[1])
    replies = os.fdopen(settings["replies"], "w", buffering=1)
    try:
        rank = _Rank(settings)
    except BaseException as error:
        traceback.print_exc()
        _say(replies, {"ready": False, "error": f"{type(error).__name__}: {error}"})
        raise
    _say(replies, {"ready": True, **rank.introduce()})
    for line in sys.stdin:
        _say(replies, rank.answer(json.loads(line), functools.partial(_say, replies)))
    os._exit(0)  # a group that has failed can block or abort while it is torn down


def _say(pipe: Any, message: Mapping[str, Any]) -> None:
    pipe.write(json.dumps(message, default=str) + "\n")


class _Rank:
    """The backend of this process and the tests that it runs."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from accelbridge.plugins import choose, instantiate

        self.settings = settings
        size, rank = settings["world"], settings["rank"]
        self.world = World(rank=rank, size=size, local_rank=rank, local_size=size, run_id=settings["run_id"])
        if settings["mutant"]:
            from accelbridge.conformance.mutants import apply

            apply(settings["mutant"])
        selection = choose(settings["backend"])
        self.backend: Backend = instantiate(selection, settings["options"])
        for name, value in self.backend.collectives.environment(self.world).items():
            os.environ.setdefault(name, value)
        import torch

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        probe = selection.probe
        chip = probe.devices[rank % len(probe.devices)].chip if probe.devices else "unknown"
        self.selection = selection
        self.capabilities = self.backend.capabilities(chip, probe.software)
        self.store: Any = self._connect() if size > 1 else None
        device = self.backend.device
        if self.backend.collectives.before_device:  # and it lasts; every case with a group finds this one
            alone = torch.distributed.HashStore()
            self.backend.collectives.init(self.store or alone, self.world, timeout_s=60.0, check=False)
        self.device = device.bind(self.world)
        from accelbridge.conformance.registry import cases

        self.cases = cases()

    def _connect(self) -> Any:
        import torch.distributed as dist

        port = self.settings["port_file"]
        limit = timedelta(seconds=300)
        if self.world.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, self.world.size, True, limit, wait_for_workers=False)
            Path(f"{port}.new").write_text(str(store.port))
            os.replace(f"{port}.new", port)
            return store
        import time

        deadline = time.monotonic() + 300
        while not Path(port).exists():
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 opened no store")
            time.sleep(0.02)
        return dist.TCPStore("127.0.0.1", int(Path(port).read_text()), self.world.size, False, limit)

    def introduce(self) -> dict[str, Any]:
        """What the report says about this process's backend. The parent asks a child, so that no plugin is ever
        loaded where the report is written."""
        import torch

        from accelbridge.conformance.evidence import strength
        from accelbridge.conformance.patched import patched_names, unstated

        probe, candidate = self.selection.probe, self.selection.candidate
        table = self.capabilities.table
        return {
            "backend": {
                "name": self.backend.name,
                "distribution": candidate.distribution,
                "version": candidate.version,
                "api_version": ".".join(map(str, self.backend.api_version)),
                "accelerator": self.backend.accelerator,
                "device_type": self.backend.device_type,
                "execution": self.backend.execution.model,
                "options": self.settings["options"],
            },
            "chip": self.capabilities.chip.name,
            "devices": [vars(device) for device in probe.devices],
            "device_count": self.backend.device.count(),
            "software": dict(probe.software),
            "facts": dict(probe.facts),
            "torch": torch.__version__,
            "cells": [
                {"op": op, "dtype": dtype, "variant": variant, "level": cell.level, "reason": cell.reason,
                 "lowering": cell.lowering}
                for (op, dtype, variant), cell in sorted(table.items())
            ],
            "patched": unstated(patched_names(), self.capabilities.replaced),
            "stated": {
                **self.capabilities.facts,
                **{f"subnormals.{dtype}": what for dtype, what in self.capabilities.subnormals.items()},
                **({"replaced": " ".join(self.capabilities.replaced)} if self.capabilities.replaced else {}),
                **({"fallbacks": " ".join(self.capabilities.fallbacks)} if self.capabilities.fallbacks else {}),
            },
            "strength": strength(self.backend, probe),
        }  # fmt: skip

    def answer(self, request: Mapping[str, Any], say: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
        """Run one test and return what became of it; ``say`` is for what must be told while it runs."""
        from accelbridge.conformance.bench import Bench

        folder = Path(request["kept"] or self.settings["folder"]) / request["token"]
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(
            case=self.cases[request["id"]],
            backend=self.backend,
            capabilities=self.capabilities,
            world=self.world,
            device=self.device,
            folder=folder,
            seed=request["seed"],
            options=dict(self.settings["options"]),
            phase=request["phase"],
            falsification=request["falsification"],
        )
        launched = self.backend.device.launches()

        def early(ends_by: int) -> None:
            # Of a device that hangs nothing can be asked any more.
            proof = self._proof(bench, launched) if ends_by else "unproven"
            say({**_answer(bench, request["token"], *_judged(bench.found)), "on_device": proof, "ends_by": ends_by})
            if not ends_by:
                os._exit(0)

        bench.answer = early
        status, code, message = self._run(bench, request["token"])
        return {**_answer(bench, request["token"], status, code, message), "on_device": self._proof(bench, launched)}

    def _proof(self, bench: Any, launched: int | None) -> str:
        return _proof(self.device.type, bench.found.fetched, launched, self.backend.device.launches())

    def _run(self, bench: Any, token: str) -> tuple[Status, str, str]:
        from accelbridge.conformance import bench as b

        try:
            self._execute(bench, token)
        except b.Abandoned:
            pass
        except b.NotSupported as error:
            return Status.NOT_SUPPORTED, "", str(error)
        except b.TooSmall as error:
            return Status.RESOURCE_ERROR, "", str(error)
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
            if not bench.found.failures:  # else what came first counts
                if _ours(error):
                    return Status.INTERNAL_ERROR, "", text
                return Status.FAIL, "RAISED", text
        if not bench.found.failures and bench.phase < bench.case.phases - 1:
            return Status.PASS, "", ""  # what it prepared is compared in a later phase
        return _judged(bench.found)

    def _execute(self, bench: Any, token: str) -> None:
        """The body, inside a process group of its own where it wants one."""
        case = bench.case
        body = case.body_under(self.backend.execution.model)
        if self.store is None:
            body(bench)
            return
        import torch.distributed as dist

        bench.store = dist.PrefixStore(f"bench/{token}", self.store)
        if not case.group:
            body(bench)
            return
        world = World(**{**vars(self.world), "run_id": token})
        self.backend.collectives.init(self.store, world, timeout_s=min(60.0, case.timeout_s), check=False)
        try:
            body(bench)
        finally:
            self.backend.collectives.shutdown()


def _judged(found: Any) -> tuple[Status, str, str]:
    """What the checks of a test make of it: its status, with code and message."""
    if found.failures:
        code, message = found.failures[0]
        return Status.FAIL, code, message
    if not found.comparisons or found.vacuous >= found.comparisons:
        return Status.MISTRUSTED, "VACUOUS", f"{found.comparisons} comparisons, none of which could have differed"
    return Status.PASS, "", ""


def _answer(bench: Any, token: str, status: Status, code: str, message: str) -> dict[str, Any]:
    return {
        "token": token,
        "rank": bench.world.rank,
        "status": status,
        "code": code,
        "message": message,
        "comparisons": bench.found.comparisons,
        "metrics": list(bench.found.metrics.values()),
        "emulated": bench.found.emulated or _host_is_device(bench),
        "cells": sorted(bench.found.cells),
        "notes": bench.found.notes,
    }


def _host_is_device(bench: Any) -> bool:
    """Whether a test of offloading moves what need not move: a device whose memory is the host's."""
    return bench.case.level == "offload" and not bench.capabilities.pinned_host_memory


def _proof(device_type: str, fetched: int, before: int | None, after: int | None) -> str:
    """Whether the device did it: results lay there and, where the device counts launches, it launched something. Of
    host processors the result's place is proof enough: there is nowhere else to run."""
    if not fetched:
        return "unproven"
    if device_type == "cpu" or (before is not None and after is not None and after > before):
        return "proven"
    return "unproven"


def _ours(error: BaseException) -> bool:
    """Whether the suite itself raised ``error``: no frame of a backend or of the library below the last of ours."""
    own = str(Path(__file__).parent)
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    last = max((i for i, name in enumerate(frames) if name.startswith(own) and "mutants" not in name), default=-1)
    return last == len(frames) - 1 or all(
        "/torch/" in name or "site-packages/numpy" in name for name in frames[last + 1 :]
    )


if __name__ == "__main__":
    main()
