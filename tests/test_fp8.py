"""The op fp8_linear and its state, in one process: numbers against float64, scales step by step, what is refused."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelbridge.backend import Capabilities, Chip, Limit, Support, unsupported
from accelbridge.errors import ConfigError, Unsupported
from accelbridge.portable.fp8 import EmulatedFp8
from accelbridge.portable.fp8_cells import FACTS, cells
from accelbridge.precision.config import Fp8Config
from accelbridge.precision.convert import convert, linears
from accelbridge.precision.filters import choose
from accelbridge.precision.recipe import check_sizes, resolve
from accelbridge.precision.state import Fp8State

SCALINGS = ("tensor", "delayed", "row", "block", "mx")
CPU = torch.device("cpu")
E4M3, E5M2 = 448.0, 57344.0


def chip(**change: Any) -> Capabilities:
    return Capabilities(**{"chip": Chip("some chip"), "table": cells(), "facts": dict(FACTS)} | change)


def fp8(model: nn.Module, capabilities: Capabilities | None = None, **config: Any) -> Fp8State:
    recipe = resolve(Fp8Config(**config), capabilities or chip(), "cpu")
    state = convert(model, recipe, EmulatedFp8("cpu"))
    state.start(CPU)
    return state


def sqnr(got: Tensor, want: Tensor) -> float:
    noise = (got.double() - want).square().sum()
    return 10 * math.log10(want.square().sum() / noise)


def gradients(model: nn.Module, x: Tensor, g: Tensor) -> list[Tensor]:
    """y, dx, and the gradients of all parameters."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(g)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(384, 256, 200), (7, 33, 5)])
def test_all_three_products_keep_their_digits(scaling: str, rows: int, columns: int, tokens: int) -> None:
    """28.5 dB for E4M3 by E4M3 and 24.6 for E5M2 by E4M3 is what rounding normal data to so many bits leaves; 1.5 dB
    less is asked, and 3.5 dB for a few hundred numbers in all."""
    torch.manual_seed(0)
    model = nn.Linear(columns, rows).to(torch.bfloat16)
    nn.init.normal_(model.weight, std=0.02)
    exact = copy.deepcopy(model).double()
    x, g = torch.randn(2, tokens, columns).bfloat16(), torch.randn(2, tokens, rows).bfloat16()
    state = fp8(model, scaling=scaling)
    gradients(model, x, g)
    state.update()  # delayed: the second step takes the scales of the first
    y, dx, dw, db = gradients(model, x, g)
    want_y, want_dx, want_dw, want_db = gradients(exact, x.double(), g.double())
    slack = 1.5 if rows > 7 else 3.5
    assert sqnr(y, want_y) > 28.5 - slack
    assert sqnr(dx, want_dx) > 24.6 - slack
    assert sqnr(dw, want_dw) > 24.6 - slack
    assert torch.allclose(db.double(), want_db, rtol=2**-7, atol=2**-6)


def test_the_formats_are_what_is_asked() -> None:
    """With E4M3 gradients the backward products gain a bit; hybrid has E5M2 there, and the wider range."""
    torch.manual_seed(0)
    x, g = torch.randn(256, 128).bfloat16(), torch.randn(256, 64).bfloat16()
    plain = nn.Linear(128, 64, bias=False).to(torch.bfloat16)
    want = gradients(copy.deepcopy(plain).double(), x.double(), g.double())
    found = {}
    for format in ("hybrid", "e4m3"):
        model = copy.deepcopy(plain)
        fp8(model, format=format)
        found[format] = [sqnr(a, b) for a, b in zip(gradients(model, x, g), want, strict=True)]
    assert found["e4m3"][0] == found["hybrid"][0]
    assert all(a > b + 2 for a, b in zip(found["e4m3"][1:], found["hybrid"][1:], strict=True))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_give_zeros(scaling: str) -> None:
    model = nn.Linear(64, 32, bias=False).to(torch.bfloat16)
    state = fp8(model, scaling=scaling)
    x, g = torch.zeros(16, 64).bfloat16(), torch.zeros(16, 32).bfloat16()
    for _ in range(2):
        assert all(not result.any() for result in gradients(model, x, g))
        state.update()
    assert state.scale.isfinite().all()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_not_hidden(scaling: str, poison: float) -> None:
    """NaN makes NaN of its row, an infinity too, or with scales of earlier steps the largest number; later steps have
    good scales again."""
    torch.manual_seed(0)
    model = nn.Linear(64, 32, bias=False).to(torch.bfloat16)
    state = fp8(model, scaling=scaling)
    x, g = torch.randn(16, 64).bfloat16(), torch.randn(16, 32).bfloat16()
    gradients(model, x, g)
    state.update()
    good = gradients(model, x, g)
    state.update()
    bad = x.clone()
    bad[3, 5] = poison
    state.count(True)
    y = gradients(model, bad, g)[0]
    state.update()
    if scaling != "delayed" or math.isnan(poison):
        assert y[3].isnan().all()
    else:
        assert y[3].isfinite().all()
    assert state.read_counters()[""]["input"].nonfinite == pytest.approx(1 / x.numel())
    state.count(False)
    assert all(torch.equal(a, b) for a, b in zip(good, gradients(model, x, g), strict=True))


# -------------------------------------------------------------------------------------------------- delayed scaling


def scales(state: Fp8State) -> list[float]:
    return state.scale.flatten().tolist()


def test_a_delayed_scale_is_that_of_the_steps_before() -> None:
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    nn.init.constant_(model.weight, 2.0)
    state = fp8(model, scaling="delayed", history=2, format="hybrid")
    assert scales(state) == [0, 0, 0]
    seen = []
    for amax in (8.0, 4.0, 2.0, 1.0):
        gradients(model, torch.full((4, 4), amax).bfloat16(), torch.full((4, 4), amax / 2).bfloat16())
        seen.append(scales(state))
        state.update()
    largest = [[a / E4M3, 2 / E4M3, a / 2 / E5M2] for a in (8.0, 8.0, 4.0)]
    assert seen[0] == [0, 0, 0]
    for got, want in zip(seen[1:], largest, strict=True):
        assert got == pytest.approx(want, rel=1e-6)


def test_margin_most_recent_and_powers_of_two() -> None:
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    nn.init.constant_(model.weight, 2.0)
    state = fp8(model, scaling="delayed", history=3, amax="most_recent", margin=2, power_of_two=True)
    for amax in (8.0, 1.0):
        gradients(model, torch.full((4, 4), amax).bfloat16(), torch.full((4, 4), amax).bfloat16())
        state.update()
    # 1 * 4 / 448, rounded up to a power of two.
    assert scales(state)[0] == 2.0**-6
    assert state.history[0, 0].tolist() == [1, 8, 0]


def test_what_grows_beyond_its_scale_saturates_and_is_counted() -> None:
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    state = fp8(model, scaling="delayed")
    ones = torch.ones(4, 4).bfloat16()
    gradients(model, ones, ones)
    state.update()
    state.count(True)
    y = gradients(model, 8 * ones, ones)[0]
    assert y.unique().tolist() == [4.0]  # each 8 was cut to 1
    lost = state.read_counters()[""]
    assert (lost["input"].saturated, lost["weight"].saturated, lost["gradient"].saturated) == (1, 0, 0)
    assert state.read_counters() == {"": {}}  # read once


def test_evaluation_changes_nothing_of_training() -> None:
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    state = fp8(model, scaling="delayed")
    ones = torch.ones(4, 4).bfloat16()
    gradients(model, ones, ones)
    state.count(True)
    with torch.no_grad():
        model(64 * ones)
    assert state.amax[0, 0] == 1
    assert state.read_counters() == {"": {}}


def test_a_checkpoint_without_histories_starts_them_anew() -> None:
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    state = fp8(model, scaling="delayed")
    ones = torch.ones(4, 4).bfloat16()
    gradients(model, ones, ones)
    state.update()
    state.restored(histories=True)
    assert state.history.any()
    assert state.scale.all()
    state.restored(histories=False)
    assert not state.history.any()
    assert not state.scale.any()


def test_what_was_not_counted_is_not_said() -> None:
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    model.weight.requires_grad_(False)
    state = fp8(model)
    state.count(True)
    model(torch.ones(2, 4).bfloat16())
    assert set(state.read_counters()[""]) == {"input", "weight"}


def test_a_layer_that_rests_keeps_its_scale() -> None:
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    state = fp8(model, scaling="delayed", history=1)
    ones = torch.ones(4, 4).bfloat16()
    gradients(model, ones, ones)
    state.update()
    before = scales(state)
    state.update()
    assert state.history.max() == 0
    assert scales(state) == before


def test_microbatches_and_recomputation_count_once_each() -> None:
    model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    state = fp8(model, scaling="delayed")
    for amax in (1.0, 4.0, 2.0):
        gradients(model, torch.full((4, 4), amax).bfloat16(), torch.ones(4, 4).bfloat16())
    state.update()
    assert state.history[0, 0, 0] == 4


def test_the_state_can_be_kept_and_put_back() -> None:
    torch.manual_seed(0)
    x, g = torch.randn(8, 16).bfloat16(), torch.randn(8, 4).bfloat16()
    first = nn.Sequential(nn.Linear(16, 4, bias=False)).to(torch.bfloat16)
    second = copy.deepcopy(first)
    ours, theirs = fp8(first, scaling="delayed"), fp8(second, scaling="delayed")
    gradients(first, x, g)
    ours.update()
    kept = {name: tensor.clone() for name, tensor in ours.state().items()}
    assert set(kept) == {"fp8.0.amax_history", "fp8.0.scale"}
    for name, tensor in theirs.state().items():
        tensor.copy_(kept[name])
    a, b = (gradients(model, 2 * x, g) for model in (first, second))
    assert all(torch.equal(left, right) for left, right in zip(a, b, strict=True))


@pytest.mark.parametrize("scaling", [s if s == "mx" else pytest.param(s, marks=pytest.mark.full) for s in SCALINGS])
def test_compiled_layers_are_one_graph(scaling: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 48, bias=False).to(torch.bfloat16)
    other = copy.deepcopy(model)
    x, g = torch.randn(32, 64).bfloat16(), torch.randn(32, 48).bfloat16()
    plain, compiled = fp8(model, scaling=scaling), fp8(other, scaling=scaling)
    runs: tuple[Any, ...] = (model, torch.compile(other, fullgraph=True))
    for run in runs:
        gradients(run, x, g)
    plain.update()
    compiled.update()
    ours, theirs = (gradients(run, x, g) for run in runs)
    plain.update()
    compiled.update()
    assert all(torch.allclose(a.float(), b.float(), rtol=2**-7, atol=2**-9) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(plain.history, compiled.history)


def test_layers_compiled_apart_share_one_state() -> None:
    """As the trainer compiles shard units, and in one graph for all of them, with counters and without."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8, bias=False)).to(torch.bfloat16) for _ in range(3)]
    model = nn.Sequential(*layers)
    plain = copy.deepcopy(model)
    ours, theirs = fp8(model, scaling="delayed"), fp8(plain, scaling="delayed")
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    x, g = torch.randn(4, 8).bfloat16(), torch.randn(4, 8).bfloat16()
    for number in range(3):
        for state in (ours, theirs):
            state.count(number == 1)
        for mine, other in zip(gradients(model, x, g), gradients(plain, x, g), strict=True):
            assert torch.equal(mine, other)
        assert ours.read_counters() == theirs.read_counters()
        ours.update()
        theirs.update()
        assert torch.equal(ours.history, theirs.history)


# ------------------------------------------------------------------------------------------------------ which layers


MODEL = {"layers.0.q": (8, 8), "layers.1.q": (8, 8), "layers.2.q": (8, 8), "head": (8, 8), "vision.proj": (8, 8)}


def test_filters() -> None:
    assert choose(MODEL, Fp8Config()).chosen == ("layers.0.q", "layers.1.q", "layers.2.q", "vision.proj")
    narrowed = choose(MODEL, Fp8Config(skip_first=1, skip_last=1, exclude=["head", "vision.*"]))
    assert narrowed.chosen == ("layers.1.q",)
    assert narrowed.note == (
        "fp8: 1 of 5 linear layers; in bfloat16 stay skip_first 1: layers.0.q; skip_last 1: layers.2.q; "
        "excluded by head: head; excluded by vision.*: vision.proj"
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"exclude": ["laers.*"]}, 'precision.fp8.exclude "laers.*" asked; no linear layer has such a name'),
        ({"exclude": ["*"]}, "the filters leave none"),
        ({"skip_first": 2, "skip_last": 2, "exclude": ["head", "vision.*"]}, "the filters leave none"),
        ({"skip_last": 1}, "no linear layer is in a numbered block; they are called up, down"),
    ],
)
def test_filters_that_say_nothing_or_leave_nothing(config: dict[str, Any], says: str) -> None:
    model = MODEL if "exclude" in config else {"up": (8, 8), "down": (8, 8)}
    with pytest.raises(ConfigError, match="fp8") as error:
        choose(model, Fp8Config(**config))
    assert says in str(error.value)


def test_only_what_is_the_op_linear_is_converted() -> None:
    class Odd(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    model = nn.Sequential(nn.Linear(4, 4), Odd(4, 4), nn.Embedding(4, 4))
    assert linears(model) == {"0": (4, 4)}


def test_a_head_that_is_tied_is_no_linear_layer_of_its_own() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    assert linears(model) == {"1": (4, 4)}


# ------------------------------------------------------------------------------------------------------------ refused


def refusal(capabilities: Capabilities, **config: Any) -> str:
    with pytest.raises((Unsupported, ConfigError)) as error:
        resolve(Fp8Config(**config), capabilities, "rocm")
    return str(error.value)


def test_a_chip_without_fp8() -> None:
    assert refusal(chip(facts={}, table={})) == (
        'precision "fp8" asked; backend "rocm" on some chip has no fp8 matmul; set precision.compute: bfloat16, or see '
        "'accelbridge explain'"
    )


def test_a_variant_that_the_chip_has_not() -> None:
    message = refusal(chip(facts={"fp8.variant": "fnuz"}), variant="fn")
    assert "precision.fp8.variant fn asked" in message
    assert "has fnuz" in message


def test_a_scaling_that_the_chip_has_not() -> None:
    table = cells()
    for key in table:
        if key[2] == "mx_pow2":
            table[key] = unsupported("no block scales before the next generation")
    message = refusal(chip(table=table), scaling="mx")
    assert "with mx scaling" in message
    assert "no block scales before the next generation; choose another precision.fp8.scaling" in message
    resolve(Fp8Config(scaling="row"), chip(table=table), "rocm")


def test_gathered_codes_serve_one_scale_only() -> None:
    assert "set gather: false, or scaling tensor or delayed" in refusal(chip(), scaling="row", gather=True)


def test_a_chip_that_wants_powers_of_two_gets_them() -> None:
    recipe = resolve(Fp8Config(), chip(facts={**FACTS, "fp8.scales": "power_of_two"}), "some")
    assert (recipe.moving, recipe.weight) == ("tensor_pow2", "tensor_pow2")


def aligned() -> Capabilities:
    limits = (Limit("k", multiple=16), Limit("n", multiple=16))
    table = {key: Support("full", limits=limits) if key[0] == "scaled_mm" else s for key, s in cells().items()}
    return chip(table=table)


def test_padding_is_declared_and_changes_nothing() -> None:
    torch.manual_seed(0)
    padded, plain = (nn.Linear(33, 7, bias=False).to(torch.bfloat16) for _ in range(2))
    padded.load_state_dict(plain.state_dict())
    x, g = torch.randn(5, 33).bfloat16(), torch.randn(5, 7).bfloat16()
    assert fp8(padded, aligned()).recipe.multiple == 16
    fp8(plain)
    for ours, theirs in zip(gradients(padded, x, g), gradients(plain, x, g), strict=True):
        assert torch.allclose(ours.float(), theirs.float(), rtol=2**-7, atol=2**-12)  # sums of another length


def test_sizes_that_would_be_padded_are_refused_where_padding_is_off() -> None:
    recipe = resolve(Fp8Config(pad=False), aligned(), "some")
    check_sizes(recipe, {"a": (32, 16)}, 48)
    with pytest.raises(
        ConfigError, match="pad false asked; b has a size of 24, and products here take multiples of 16"
    ):
        check_sizes(recipe, {"a": (32, 16), "b": (24, 16)}, 48)
    with pytest.raises(ConfigError, match="a microbatch has a size of 40"):
        check_sizes(recipe, {"a": (32, 16)}, 40)


@pytest.mark.parametrize("shape", [(8,), (0, 8), (2, 0, 8), (2, 3, 8)])
def test_shapes_are_those_of_a_linear_layer(shape: tuple[int, ...]) -> None:
    model = nn.Linear(8, 4).to(torch.bfloat16)
    plain = copy.deepcopy(model)
    fp8(model, scaling="delayed")
    x = torch.ones(shape).bfloat16()
    assert model(x).shape == plain(x).shape
    model(x).sum().backward()


def test_shapes_that_do_not_fit() -> None:
    model = nn.Linear(8, 8).to(torch.bfloat16)
    fp8(model)
    with pytest.raises(ValueError, match="the same in"):
        model(torch.zeros(4, 9).bfloat16())
