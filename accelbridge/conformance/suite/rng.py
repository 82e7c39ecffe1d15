"""RNG: random numbers of a device, and what makes them come again.

Under spmd the one process has one generator, and the same bodies serve; where ranks matter it is said.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from accelbridge import ops
from accelbridge.backend import Request
from accelbridge.conformance.bench import Bench
from accelbridge.conformance.oracle import small, statistics
from accelbridge.conformance.registry import case

_DRAWS = 2**20
_LEAST_P = 1e-6
"""Goodness of fit: one run in a million fails by chance."""


def _draw(t: Bench, size: int = 257) -> Tensor:
    """Draws of three kinds from the device's default generator, on the device."""
    made = [torch.rand(size, device=t.device), torch.randn(size, device=t.device)]
    return torch.cat([*made, torch.randint(0, 1000, (size,), device=t.device).float()])


def _host(x: Tensor) -> Tensor:
    """What later draws are compared with: never falsified, as they are."""
    return x.detach().to("cpu", copy=True)


def _seeded(t: Bench, seed: int) -> Tensor:
    t.run(t.backend.device.seed, seed)
    return _draw(t)


@case("RNG-001", "core")
def seeds(t: Bench) -> None:
    """The same seed gives the same stream, on the device and on the host; other seeds, also ones that differ above bit
    32 alone, give others."""
    numbers = (0, 1, 1234, 2**31, 2**32, 2**32 + 1, 2**40 + 1234, 2**63 - 1)
    first = {seed: _host(_seeded(t, seed)) for seed in numbers}
    for seed in numbers:
        again = _seeded(t, seed)
        t.equal(again, first[seed], name=f"seed {seed} again")
        host = torch.rand(9)
        t.run(t.backend.device.seed, seed)
        _draw(t)
        t.equal(torch.rand(9), host, name=f"seed {seed} on the host", host=True)
    different = {tuple(values[:64].tolist()) for values in first.values()}
    t.same(len(different), len(numbers), "streams that differ", code="STREAM")


@case("RNG-002", "core")
def state_restored(t: Bench) -> None:
    """The generator's state, taken in mid-stream and through a file, brings the same draws again, as often as it is
    restored, whatever was drawn or seeded in between."""
    device = t.backend.device
    t.run(device.seed, 4321)
    _draw(t, 100)
    state = t.run(device.rng_state)
    for name, value in state.items():
        t.same((str(value.dtype), value.device.type), ("torch.uint8", "cpu"), f"state {name}", code="STATE")
    torch.save(dict(state), t.folder / f"state{t.world.rank}")
    want, host = _host(_draw(t)), torch.rand(9)
    restored = torch.load(t.folder / f"state{t.world.rank}", weights_only=True)
    for turn in range(3):
        t.run(device.seed, 5 + turn)
        _draw(t, 10 + turn)
        t.run(device.set_rng_state, restored)
        t.equal(_draw(t), want, code="STREAM", name="the same draws")
        t.equal(torch.rand(9), host, code="STREAM", name="the same draws on the host", host=True)


@case("RNG-003", "core")
def distributions(t: Bench) -> None:
    """2^20 uniform, normal and Bernoulli draws of the device fit their distributions (Kolmogorov, chi-square and
    binomial tests, p > 1e-6 each) and their bounds; and the op dropout, in everything that a plan may bind, keeps the
    share that it should."""
    t.run(t.backend.device.seed, t.seed)
    uniform = t.fetch(torch.rand(_DRAWS, device=t.device))
    t.at_least(float(uniform.min()), 0.0, "least of uniform draws", code="FIT")
    t.at_most(float(uniform.max()), 1.0 - 2.0**-26, "greatest of uniform draws", code="FIT")
    counts = torch.histc(uniform, 256, 0.0, 1.0)
    expected = torch.full((256,), _DRAWS / 256.0, dtype=torch.float64)
    _fits(t, statistics.chi_square_p(counts, expected), "uniform, 256 bins")
    _fits(t, statistics.kolmogorov_p(uniform), "uniform, all")
    normal = t.fetch(torch.randn(_DRAWS, device=t.device))
    _fits(t, statistics.kolmogorov_p(statistics.normal_cdf(normal)), "normal")
    pairs = (uniform[0::2] * 16).long() * 16 + (uniform[1::2] * 16).long()
    counts = torch.bincount(pairs, minlength=256)
    _fits(t, statistics.chi_square_p(counts, expected / 2.0), "pairs of uniform draws")
    for p in (0.1, 0.5, 0.9):
        drawn = t.fetch(torch.empty(_DRAWS, device=t.device).bernoulli_(p))
        t.same(bool(((drawn == 0) | (drawn == 1)).all()), True, f"Bernoulli {p} is 0 or 1", code="FIT")
        _fits(t, statistics.binomial_p(int(drawn.sum()), _DRAWS, p), f"Bernoulli {p}")
    _dropout_keeps(t)


def _fits(t: Bench, p: float, name: str) -> None:
    t.at_least(p, _LEAST_P, f"p-value, {name}", code="FIT")


def _dropout_keeps(t: Bench) -> None:
    rows, columns, site = 256, 1024, torch.tensor(99, dtype=torch.int32)
    keys = ops.dropout_keys(t.seed, 3, torch.arange(rows))
    found = t.candidates(Request("dropout", "float32"))
    for p in (0.1, 0.75):
        for name, dropout in found:
            out = t.run(dropout, t.put(torch.ones(rows, columns)), t.put(keys), t.put(site), p)
            dropped = int((t.fetch(out) == 0).sum())
            _fits(t, statistics.binomial_p(dropped, rows * columns, p), f"dropout {p} {name}")


@case("RNG-004", "core")
def fork_restores(t: Bench) -> None:
    """``torch.random.fork_rng`` for the device leaves the stream outside as it was, bit for bit, whatever is seeded and
    drawn inside: recomputation relies on it."""
    t.needs(t.capabilities.recompute, "recomputation")
    device = t.backend.device
    want = _host(torch.cat([_seeded(t, 77), _draw(t)]))
    host = torch.rand(9)
    outer = _seeded(t, 77)
    indices = [t.device.index or 0] if t.device.type != "cpu" else []
    with torch.random.fork_rng(devices=indices, device_type=t.device.type):
        inside = _seeded(t, 78)
        t.run(device.seed, 78)
        t.equal(_draw(t), _host(inside), code="STREAM", name="inside")
    t.equal(torch.cat([outer, _draw(t)]), want, code="STREAM", name="outside")
    t.equal(torch.rand(9), host, code="STREAM", name="outside, on the host", host=True)


def _masks(t: Bench, samples: Tensor, starts: tuple[int, ...], columns: int) -> Tensor:
    """The dropout mask of ``samples`` (global ids), at ``starts``, as it is drawn in training."""
    keys, site = ops.dropout_keys(11, 5, samples), torch.tensor(1234, dtype=torch.int32)
    ones = torch.ones(len(samples), columns)
    found = t.candidates(Request("dropout", "float32"))
    drawn = [t.run(dropout, t.put(ones), t.put(keys), t.put(site), 0.5, starts) for _, dropout in found]
    for (name, _), mask in zip(found[1:], drawn[1:], strict=True):
        t.equal(mask, _host(drawn[0]), code="STREAM", name=f"dropout {name}")
    return drawn[0]


@case(
    "RNG-005",
    "train",
    worlds=(2,),
    spmd="one process draws for all devices from one stream of global samples, so there are no ranks to keep apart",
)
def streams_of_ranks(t: Bench) -> None:
    """Ranks that hold other samples draw other dropout masks, and ranks that hold slices of the same samples draw the
    slices of one mask, equal on each: masks are keyed by global sample and coordinate. Generators seeded per rank, as
    the trainer seeds them, give streams that differ, and seeded alike they give the same."""
    rank, size, store = t.world.rank, t.world.size, t.store
    assert store is not None
    samples, columns = torch.arange(16 * size), 64
    keys, site = ops.dropout_keys(11, 5, samples), torch.tensor(1234, dtype=torch.int32)
    whole = small.dropout(torch.ones(len(samples), columns * size), keys, site, 0.5).float()
    mine = slice(16 * rank, 16 * (rank + 1))
    t.equal(_masks(t, samples[mine], (0,), columns * size), whole[mine], code="STREAM", name="other samples")
    different = {tuple(row) for row in t.fetch(_masks(t, samples, (0,), columns * size)).tolist()}
    t.same(len(different), len(samples), "masks of samples that differ", code="STREAM")
    part = slice(columns * rank, columns * (rank + 1))
    t.equal(_masks(t, samples, (columns * rank,), columns), whole[:, part], code="STREAM", name="a slice of each")
    drawn = {"own": t.fetch(_seeded(t, 1000 + rank)), "same": t.fetch(_seeded(t, 1000))}
    for name, values in drawn.items():
        store.set(f"{name}{rank}", str(values[:64].tolist()))
    for name, count in (("own", size), ("same", 1)):
        texts = {store.get(f"{name}{other}") for other in range(size)}
        t.same(len(texts), count, f"streams of ranks seeded by their {name}", code="STREAM")


@case("RNG-006", "train")
def recomputed_alike(t: Bench) -> None:
    """Activation recomputation draws the dropout mask of the forward pass again: with dropout from the device's own
    generator, and with dropout keyed by sample."""
    t.needs(t.capabilities.recompute, "recomputation")
    x, keys = t.uniform(32, 48) + 1.0, ops.dropout_keys(3, 1, torch.arange(32))
    site, device_keys = t.put(torch.tensor(7, dtype=torch.int32)), t.put(keys)
    dropouts = {
        "generator": lambda h: torch.nn.functional.dropout(h, 0.5, training=True),
    }
    for name, keyed in t.candidates(Request("dropout", "float32")):
        dropouts[f"keyed, {name}"] = lambda h, keyed=keyed: keyed(h, device_keys, site, 0.5)
    for name, dropout in dropouts.items():
        t.run(t.backend.device.seed, 5)
        leaf = t.put(x).requires_grad_()
        # The square keeps the dropped activations, which are recomputed to be differentiated.
        out = checkpoint(lambda h, drop=dropout: drop(h).square(), leaf, use_reentrant=False)
        _draw(t)  # what comes between forward and backward in a model
        (gradient,) = torch.autograd.grad(out.sum(), leaf)
        # d/dx (m x)^2 = 2 (m x)^2 / x for a mask m.
        want = 2.0 * t.fetch(out).double() / x.double()
        t.within(gradient, want, 1e-4, code="STREAM", name=name)
        t.same(bool((t.fetch(out) == 0).any()), True, f"{name} drops something", code="STREAM")


@case("RNG-007", "core")
def generators_apart(t: Bench) -> None:
    """Two generators of the device draw what each draws alone, however they take turns, and leave the default stream as
    it is."""
    t.needs(t.capabilities.generators, "generators")

    def alone(seed: int) -> Tensor:
        generator = torch.Generator(device=t.device).manual_seed(seed)
        return torch.cat([torch.rand(100, device=t.device, generator=generator) for _ in range(3)])

    first, second = (_host(alone(seed)) for seed in (1, 2))
    default = _host(torch.cat([_seeded(t, 9), _draw(t)]))
    begun = _seeded(t, 9)
    pair = [torch.Generator(device=t.device).manual_seed(seed) for seed in (1, 2)]
    taken = [[torch.rand(100, device=t.device, generator=g) for g in pair] for _ in range(3)]
    t.equal(torch.cat([turn[0] for turn in taken]), first, code="STREAM", name="the first in turns")
    t.equal(torch.cat([turn[1] for turn in taken]), second, code="STREAM", name="the second in turns")
    t.equal(torch.cat([begun, _draw(t)]), default, code="STREAM", name="the default one")


@case("RNG-008", "core")
def waiting_draws_nothing(t: Bench) -> None:
    """Draws don't depend on when the host waits: the same with ``synchronize``, reads of memory statistics, products
    and transfers between them. Where the backend states that they depend on where graphs are cut (``rng.stream``), the
    same cuts give the same draws."""
    want = _host(torch.cat([_seeded(t, 31), _draw(t), _draw(t)]))
    if t.capabilities.facts.get("rng.stream") == "by_graph":
        want = _host(_waiting(t))
    t.equal(_waiting(t), want, code="STREAM")


def _waiting(t: Bench) -> Tensor:
    parts = [_seeded(t, 31)]
    for _ in range(2):
        t.backend.device.synchronize()
        t.backend.device.memory()
        x = t.put(torch.ones(16, 16))
        t.run(t.backend.matmul.matmul, x, x)
        t.run(t.backend.offload.to_host, x).wait()
        t.backend.device.synchronize()
        parts.append(_draw(t))
    return torch.cat(parts)
