"""STR: what is queued on a device, and waiting for it.

The interface has no streams or events. What they are for is asked of transfers, ``Transfer.wait`` and
``Device.synchronize``, with whatever a device queues behind them. Under spmd the same bodies serve: one process queues
there too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelbridge.conformance.bench import Bench
from accelbridge.conformance.registry import case

_SLOW = 2**21
"""Elements of a transfer that takes a while: 8 MiB."""


def _queue_work(t: Bench, x: Tensor, rounds: int = 20) -> Tensor:
    """A chain of products that ends in ``x`` again: exact, as the factor is a permutation applied an even number of
    times."""
    swapped = torch.eye(x.shape[1]).flip(0)
    turn = t.put(swapped)
    for _ in range(rounds - rounds % 2):
        x = t.backend.matmul.matmul(x, turn)
    return x


@case("STR-001", "core")
def wait_orders(t: Bench) -> None:
    """A transfer that was waited for holds what the work queued before it made, not what lay there: 60 times, to the
    host and back to the device, behind chains of products, in memory that is used again each time."""
    host, device = torch.zeros(64, 64), torch.zeros(64, 64, device=t.device)
    for turn in range(60):
        x = t.integers(64, 64, low=-64, high=64, name=f"turn {turn % 5}") + turn
        made = _queue_work(t, t.put(x), 20 if turn % 10 == 0 else 2)
        got = t.run(t.backend.offload.to_host, made, out=host).wait()
        t.equal(got, x, code="ORDER", name="to_host", host=True)
        back = t.run(t.backend.offload.to_device, x * 2.0, out=device).wait()
        t.equal(back + made, x * 3.0, code="ORDER", name="to_device")


@case("STR-002", "core")
def synchronize_waits(t: Bench) -> None:
    """``Device.synchronize`` returns only when all that is queued has finished: products, and transfers of 8 MiB that
    nobody waits for, whose destinations on the host are read directly."""
    x = t.integers(_SLOW // 1024, 1024, low=-64, high=64)
    for turn in range(6):
        want = x + turn
        out = torch.full(x.shape, torch.nan)
        made = _queue_work(t, t.put(x) + turn, 2)
        transfer = t.run(t.backend.offload.to_host, made, out=out)
        t.backend.device.synchronize()
        t.equal(out.clone(), want, code="ORDER", name="a transfer to the host, synchronised", host=True)
        transfer.wait()
        t.equal(out, want, code="ORDER", name="the same, waited for", host=True)


@case("STR-003", "core")
def memory_not_reused_early(t: Bench) -> None:
    """Memory that is still needed is not handed out again: not that of a fetched tensor of which a view is alive, and
    not what work still queued reads though nobody holds it any more."""
    offload, kept = t.backend.offload, []
    for turn in range(12):
        x = t.integers(64, 64, low=-64, high=64, name=f"turn {turn}")
        view = t.run(offload.to_device, x).wait()[1:]
        kept.append((view, x[1:]))
        # The tensor itself is gone before its result is made; the next transfers want memory of its size.
        made = _queue_work(t, t.run(offload.to_device, x).wait(), 4)
        poison = [t.run(offload.to_device, torch.full((64, 64), torch.nan)) for _ in range(3)]
        t.equal(made, x, code="ORDER", name="work queued on memory that was freed")
        for transfer in poison:
            transfer.wait()
        del poison
    for view, want in kept:
        t.equal(view, want, code="ORDER", name="a view of a fetched tensor")
