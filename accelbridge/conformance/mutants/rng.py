"""Defects of random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accelbridge import ops
from accelbridge.conformance.mutants import Patch, benign, mutant
from accelbridge.ops import keyed_dropout
from accelbridge.portable.device import TorchDevice


@mutant("R1", "dropout draws the same for all samples", {"RNG-005": "STREAM"})
def one_stream(patch: Patch) -> None:
    patch(keyed_dropout, "_key", lambda inner, text: inner(text.rpartition(" ")[0]))


@mutant("R1b", "slices of a sample draw as if each were the whole", {"RNG-005": "STREAM"})
def slices_alike(patch: Patch) -> None:
    inner = ops.reference("dropout")
    ops._REFERENCE["dropout"] = lambda x, keys, site, p, starts=(): inner(x, keys, site, p)


@mutant("R2", "the state is that after seeding, without what was drawn", {"RNG-002": "STREAM"})
def offset_omitted(patch: Patch) -> None:
    def rng_state(inner: Any, self: Any) -> Mapping[str, Tensor]:
        return {"host": torch.Generator().manual_seed(torch.initial_seed()).get_state()}

    patch(TorchDevice, "rng_state", rng_state)


@mutant("R3", "restoring a state does nothing", {"RNG-002": "STREAM", "RNG-006": "STREAM"})
def restore_ignored(patch: Patch) -> None:
    patch(TorchDevice, "set_rng_state", lambda inner, self, state: None)
    patch(torch, "set_rng_state", lambda inner, state: None)  # what recomputation calls


@mutant("R4", "Bernoulli draws 1 as often as it should draw 0", {"RNG-003": "FIT"})
def inverted(patch: Patch) -> None:
    def bernoulli(inner: Any, self: Tensor, p: float = 0.5, **kwargs: Any) -> Tensor:
        return inner(self, 1.0 - p, **kwargs)

    patch(torch.Tensor, "bernoulli_", bernoulli)


@mutant("R4b", "dropout keeps what it should drop", {"RNG-003": "FIT"})
def keeps_what_it_drops(patch: Patch) -> None:
    inner = ops.reference("dropout")
    ops._REFERENCE["dropout"] = lambda x, keys, site, p, *rest: inner(x, keys, site, 1.0 - p, *rest)


@mutant("R5", "a fork of the generators leaks", {"RNG-004": "STREAM"})
def leaking_fork(patch: Patch) -> None:
    @contextmanager
    def nothing(inner: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    patch(torch.random, "fork_rng", nothing)


@mutant("R6", "seeds are cut to 32 bits", {"RNG-001": "STREAM"})
def short_seeds(patch: Patch) -> None:
    patch(TorchDevice, "seed", lambda inner, self, seed: inner(self, seed & 0xFFFFFFFF))


@mutant("R7", "waiting for the device draws", {"RNG-008": "STREAM"})
def waiting_draws(patch: Patch) -> None:
    def synchronize(inner: Any, self: Any) -> None:
        inner(self)
        torch.rand(1)

    patch(TorchDevice, "synchronize", synchronize)


@mutant("R8", "generators share one state", {"RNG-007": "STREAM"})
def shared_state(patch: Patch) -> None:
    only = torch.Generator()

    class Shared:  # a class still, as annotations are evaluated with it
        def __new__(cls, device: Any = None) -> Any:
            return only

    torch.Generator = Shared  # pyright: ignore[reportAttributeAccessIssue]


@benign("B6", "another algorithm: seeds are scrambled, and uniform draws mirrored", ("RNG",))
def other_algorithm(patch: Patch) -> None:
    patch(TorchDevice, "seed", lambda inner, self, seed: inner(self, (seed * 6364136223846793005 + 1) % 2**63))

    def rand(inner: Any, *size: Any, **kwargs: Any) -> Tensor:
        drawn = inner(*size, **kwargs)
        return 1.0 - 2.0**-24 - drawn  # draws are multiples of 2^-24

    patch(torch, "rand", rand)
