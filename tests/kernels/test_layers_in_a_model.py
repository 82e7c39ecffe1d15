"""The decoder on our kernels of layers and losses, interpreted: as on the portable ops, recomputed, compiled, measured;
and the tiles that each chip ships for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from accelbridge import ops
from accelbridge.kernels import tiles
from accelbridge.kernels.candidates import LAYERS, layers
from accelbridge.kernels.limits import RMS_NORM_COLUMNS, ROPE_PAIRS
from accelbridge.kernels.tiles import Tile
from accelbridge.memory import recompute
from accelbridge.memory.budget import measure
from accelbridge.memory.choice import Recompute
from accelbridge.models import Decoder, ModelConfig
from accelbridge.parallel.layout import Layout
from tests.kernels.aot import TARGETS, tiles_of
from tests.kernels.layer_checks import TILES

CONFIG = ModelConfig(vocab_size=300, dim=64, layers=1, heads=4, kv_heads=2, ffn_dim=96)
LARGE = {
    name: replace(tile, blocks={**tile.blocks, **{b: 64 for b in ("ROWS", "HEADS") if b in tile.blocks}})
    for name, tile in TILES.items()
} | {name: Tile({"BLOCK": 4096}) for name in ("softmax_parts", "softmax_gradient", "swiglu_forward", "swiglu_backward")}
"""As few programs as will do: each costs the interpreter as much, whatever its size."""
CANDIDATES = {each.op: each for each in layers("interpreted", LARGE, {"triton": "3.7.1"})}


@pytest.fixture(autouse=True)
def unbound() -> Iterator[None]:
    yield
    ops.reset()


def bind() -> None:
    ops.bind({op: each.load() for op, each in CANDIDATES.items()})


def step(chunked: bool, asked: Recompute | None = None, compiled: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one microbatch, with the ops that are bound."""
    asked = asked or Recompute()
    recompute.bind(asked, compiled)
    model = Decoder(CONFIG)
    model.reset_parameters(3)
    compile_unit: Any = partial(torch.nn.Module.compile, fullgraph=True, backend="aot_eager") if compiled else None
    finish = recompute.finisher(asked, compile_unit)
    for index, layer in enumerate(model.layers):
        finish(f"layers.{index}", layer)
    tokens = torch.randint(0, 300, (2, 5), generator=torch.Generator().manual_seed(5))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    if chunked:
        loss = model(tokens, targets_BS=targets)
    else:
        loss = ops.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=0)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in found[1].items():
        off = (gradient - wanted[1][name]).norm() / wanted[1][name].norm()
        assert off < 2e-6, f"{name}: {off}"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_step_is_that_of_the_portable_ops(chunked: bool) -> None:
    ops.reset()
    wanted = step(chunked)
    bind()
    assert_close(step(chunked), wanted)


@pytest.mark.parametrize("asked", [Recompute("full"), Recompute("selective", ("rms_norm", "swiglu"))], ids=str)
def test_recomputation_changes_no_bit(asked: Recompute) -> None:
    bind()
    wanted = step(False)
    bind()
    loss, gradients = step(False, asked)
    assert torch.equal(loss, wanted[0])
    assert [name for name in gradients if not torch.equal(gradients[name], wanted[1][name])] == []


def test_a_compiled_layer_is_one_graph() -> None:
    bind()
    wanted = step(False)
    bind()
    assert_close(step(False, compiled=True), wanted)


def test_what_they_keep_is_measured_without_a_device() -> None:
    """On fake tensors, by no stand-in; a step on them keeps less than one on the portable ops."""

    def kept(loaders: dict[str, Callable[[], Any]], chunked: bool) -> int:
        found = measure(CONFIG, Layout(), (2, 12), "bfloat16", loaders, segments=False, chunked_loss=chunked)
        assert found.notes == ()
        return found.outside + found.layer

    ours = {op: each.load for op, each in CANDIDATES.items() if not op.startswith("vocab_parallel")}
    sizes = [kept(loaders, chunked) for loaders in ({}, ours) for chunked in (False, True)]
    portable, portable_chunked, fused, fused_chunked = sizes
    assert fused < portable
    assert fused_chunked < portable_chunked < portable
    assert fused_chunked < fused


# ------------------------------------------------------------------------------------------------- what is shipped


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_each_chip_has_the_tiles_that_launches_look_up(target: Any) -> None:
    shipped, _ = tiles_of(target)
    assert set(TILES) <= set(shipped)
    widest = {"rms_norm_forward": RMS_NORM_COLUMNS, "rms_norm_backward": RMS_NORM_COLUMNS, "rope": ROPE_PAIRS}
    for kernel, width in widest.items():
        assert f"{kernel}.{width}" in shipped
        assert f"{kernel}.{2 * width}" not in shipped
    for name in TILES:
        assert set(shipped[name].blocks) == set(TILES[name].blocks)


def test_loading_a_candidate_binds_the_tiles() -> None:
    assert tiles.bound() == {}
    for op, each in CANDIDATES.items():
        assert each.load().__name__ == op
    assert tiles.bound() == LARGE
    assert set(CANDIDATES) == set(LAYERS)
