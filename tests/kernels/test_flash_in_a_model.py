"""The decoder on our attention, interpreted: as on the portable op, compiled, measured, split over ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from accelbridge import ops
from accelbridge.backend import FULL, Request
from accelbridge.kernels import flash, tiles
from accelbridge.kernels.flash_candidate import flash_attention
from accelbridge.memory.budget import measure
from accelbridge.parallel.layout import Layout
from tests.kernels.aot import TARGETS, Target, tiles_of
from tests.kernels.flash_checks import CONFIG, decoder, some_tiles, step
from tests.kernels.flash_on_two import on_two
from tests.ranks import run_ranks

TILES = some_tiles(64, 64)
OURS = flash_attention(TILES, {}, FULL, lambda request: None)


@pytest.fixture(autouse=True)
def unbound(no_tiles: None) -> Iterator[None]:
    ops.reset()
    yield
    ops.reset()


def gradients(compiled: bool = False) -> dict[str, torch.Tensor]:
    """Of one step, and its loss, with the attention that is bound."""
    model = decoder()
    if compiled:
        for layer in model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
    loss = step(model)
    return {"loss": loss, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, x in found.items():
        assert (x - wanted[name]).norm() <= 2e-5 * wanted[name].norm(), name


def test_a_step_is_that_of_the_portable_op() -> None:
    wanted = gradients()
    ops.bind({"attention": OURS.load()})
    ours = gradients()
    assert_close(ours, wanted)
    torch._dynamo.reset()
    assert_close(gradients(compiled=True), ours)


def test_what_it_keeps_is_measured_without_a_device() -> None:
    """On fake tensors, by no stand-in: without the scores, which the portable op keeps."""

    def kept(loaders: dict) -> int:
        found = measure(CONFIG, Layout(), (2, 200), "bfloat16", loaders, segments=True)
        assert found.notes == ()
        return found.layer

    assert kept({"attention": OURS.load}) < kept({}) / 2


def test_two_ranks() -> None:
    run_ranks(on_two, 2, timeout=240, env={"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"})


# --------------------------------------------------------------------------------------------------- what is shipped


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_each_chip_has_the_tiles_that_launches_look_up(target: Target) -> None:
    shipped, lacking = tiles_of(target)
    for name, tile in TILES.items():
        assert name in lacking or set(shipped[name].blocks) == set(tile.blocks), name
        if "QUERIES" in tile.blocks and name in shipped:
            assert flash._PADDED % shipped[name].blocks["QUERIES"] == 0


def test_loading_the_candidate_binds_its_tiles() -> None:
    assert tiles.bound() == {}
    assert OURS.load() is flash.attention
    assert tiles.bound() == TILES


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (
            Request("attention", "bfloat16", {"head_dim": 80, "sequence": 2**30}, needs=frozenset({"softcap", "lse"})),
            "",
        ),
        (Request("attention", "float32", {"head_dim": 8}, needs=frozenset({"causal", "window", "segments"})), ""),
        (Request("attention", "float64", {"head_dim": 64}), "takes bfloat16, float16, float32, not float64"),
        (Request("attention", "bfloat16", {"head_dim": 264}), "heads up to 256, not 264"),
        (Request("attention", "bfloat16", {"head_dim": 100}), "a multiple of 8, not 100"),
        (Request("attention", "bfloat16", {"sequence": 2**30 + 1}), "counts in int32, not 1073741825"),
        (Request("attention", "bfloat16", needs=frozenset({"sinks"})), 'knows no "sinks"'),
    ],
)
def test_what_the_candidate_serves(request_: Request, why: str) -> None:
    found = OURS.supports(request_)
    assert bool(found) is (why == "")
    assert why in found.reason


def test_a_chip_may_lack_tiles() -> None:
    some = {name: tile for name, tile in TILES.items() if ".256" not in name}
    candidate = flash_attention(some, {"128": "it has no such thing"}, FULL, lambda request: None)
    assert candidate.supports(Request("attention", "bfloat16", {"head_dim": 64}))
    assert candidate.supports(Request("attention", "bfloat16", {"head_dim": 96})).reason == "it has no such thing"
    assert "no tiles for heads of 256" in candidate.supports(Request("attention", "float16", {"head_dim": 256})).reason
