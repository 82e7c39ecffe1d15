"""Attention by the portable kernel, interpreted, against the conformance suite's oracle: float64, with bounds A1 (out),
A2 (lse) and A3 (gradients), and the floor A5 of the ratio of signal to noise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from accelbridge.backend import Mask
from accelbridge.conformance.oracle.attention import Exact, Rules
from accelbridge.errors import Unsupported
from accelbridge.kernels import flash, tiles
from accelbridge.ops.dot_product import attention as reference
from tests.kernels.flash_checks import some_tiles
from tests.kernels.mutants import mutant as mutant_of
from tests.kernels.mutants import sampled

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SQNR_DB = {BF16: 45.0, F16: 62.0, F32: 100.0}
TILES = some_tiles(32, 32)


@pytest.fixture(autouse=True)
def bound(no_tiles: None) -> None:
    tiles.bind(TILES)


# --------------------------------------------------------------------------------------------------------- calls


@dataclass(frozen=True)
class Call:
    """One call, with what it is given."""

    queries: int
    keys: int
    rules: Rules
    dtype: torch.dtype = BF16
    dim: int = 64
    heads: int = 2
    groups: int = 1
    batch: int = 1
    positive: bool = False

    def made(self, name: str, heads: int, length: int) -> Tensor:
        """As a projection leaves it, [B, S, H, D] in memory."""
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        x = torch.randn(self.batch, length, heads, self.dim, generator=generator)
        return (x.abs() if self.positive else x).to(self.dtype).transpose(1, 2)

    @property
    def mask(self) -> Mask:
        return Mask(self.rules.causal, self.rules.window, self.rules.segments)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.made(name, heads, length) for name, heads, length in (
            ("q", self.heads, self.queries), ("k", self.groups, self.keys), ("v", self.groups, self.keys)))  # fmt: skip
        return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def given(self) -> tuple[Tensor, Tensor]:
        """Gradients of out and lse. A row that sees nothing has no lse to speak of, and none of that."""
        dout = self.made("dout", self.heads, self.queries)
        return dout, self.made("dlse", self.heads, self.queries)[..., 0].float()

    def run(self, backward: bool = True) -> dict[str, Tensor]:
        q, k, v = self.inputs()
        options = {"scale": self.rules.scale, "softcap": self.rules.softcap}
        out, lse = flash.attention(q, k, v, self.mask, **options, return_lse=True)  # pyright: ignore[reportArgumentType]
        if not backward:
            return {"out": out, "lse": lse}
        found = torch.autograd.grad((out, lse), (q, k, v), self.given())
        return {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), found, strict=True))}

    def right(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(exact result, bound) by name."""
        q, k, v = (x.detach() for x in self.inputs())
        exact = Exact(q, k, v, self.rules)
        given = exact.gradients(*self.given())
        return {"out": (exact.out, exact.out_bound), "lse": (exact.lse, exact.lse_bound), **given}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    found = flash.attention(q, k, v, mask)
    assert isinstance(found, Tensor)
    return found


def excess(found: Tensor, exact: Tensor, bound: Tensor) -> float:
    """Largest error in units of the bound; infinite for NaN or a wrong infinity."""
    same = exact.isinf() & (found.double() == exact)
    ratio = (found.detach().double() - exact.detach()).abs() / bound.clamp_min(1e-300)
    return float(torch.where(same, 0.0, ratio).detach().nan_to_num(nan=torch.inf).max()) if found.numel() else 0.0


def sqnr(found: Tensor, exact: Tensor) -> float:
    """Of the worst head, in dB."""
    noise = (found.detach().double() - exact).square().sum((-1, -2)).clamp_min(1e-300)
    return float((10 * torch.log10(exact.square().sum((-1, -2)).clamp_min(1e-300) / noise)).min())


def excesses(call: Call, backward: bool = True) -> dict[str, float]:
    right = call.right()
    return {name: excess(found, *right[name]) for name, found in call.run(backward).items()}


IDS = torch.tensor([[3] * 5 + [1] * 40 + [0] * 21 + [2] * 34])
AGAIN = torch.tensor([[1] * 30 + [2] * 30 + [1] * 40], dtype=torch.int32)  # a document in two pieces
CALLS = {
    "causal": Call(100, 100, Rules(causal=True), heads=4, groups=2),
    "causal, float32": Call(100, 100, Rules(causal=True), F32),
    "causal, heads of their own": Call(70, 70, Rules(causal=True), heads=2, groups=2, dim=128),
    "full, float16": Call(70, 100, Rules(), F16, dim=128),
    "window": Call(100, 100, Rules(causal=True, window=40), dim=32),
    "window of one": Call(70, 70, Rules(causal=True, window=1)),
    "documents": Call(100, 100, Rules(causal=True, segments=IDS), dim=80),
    "documents, both ways": Call(100, 100, Rules(segments=AGAIN), dim=96),
    "documents, window": Call(100, 100, Rules(causal=True, window=33, segments=IDS)),
    "documents, float32": Call(100, 100, Rules(causal=True, segments=IDS), F32),
    "fewer queries": Call(40, 100, Rules(causal=True), batch=2),
    "more queries": Call(100, 40, Rules(causal=True)),
    "more queries, window": Call(100, 40, Rules(causal=True, window=9)),
    "softcap": Call(70, 70, Rules(causal=True, softcap=2.0), F32),
    "softcap, documents": Call(100, 100, Rules(causal=True, segments=IDS, softcap=20.0, scale=-0.3)),
    "negative scale": Call(70, 70, Rules(causal=True, scale=-0.5)),
    "no scale": Call(40, 70, Rules(scale=0.0), F32),
    "positive": Call(100, 100, Rules(causal=True), positive=True),
    "heads of 192": Call(40, 70, Rules(causal=True), dim=192),
    "heads of 256": Call(40, 40, Rules(), dim=256),
    "one of each": Call(1, 1, Rules(causal=True)),
    "one query": Call(1, 100, Rules()),
    "large scores": Call(40, 100, Rules(scale=300.0), F32, dim=16),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_within_bounds(call: Call) -> None:
    found, right = call.run(), call.right()
    assert {name: x.dtype for name, x in found.items()} == {
        name: F32 if name == "lse" else call.dtype for name in right
    }
    assert {name: excess(found[name], *each) for name, each in right.items() if excess(found[name], *each) > 1} == {}
    if not call.positive and call.queries <= call.keys and call.keys > 1 and call.rules.scale != 0.0:
        for name in ("out", "dq", "dk", "dv") if call.rules.scale != 300.0 else ("out",):
            assert sqnr(found[name], right[name][0]) >= SQNR_DB[call.dtype], name


def test_rows_that_see_nothing() -> None:
    found = CALLS["more queries"].run()
    assert not found["out"][:, :, :60].any()
    assert (found["lse"][:, :, :60] == -torch.inf).all()
    assert not found["dq"][:, :, :60].any()
    assert all(found[name].isfinite().all() for name in ("out", "dq", "dk", "dv"))


def test_lse_alone_leaves_values_untouched() -> None:
    q, k, v = CALLS["causal"].inputs()
    lse = flash.attention(q, k, v, Mask(), return_lse=True)[1]
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
    assert not dv.any()
    assert dq.any()
    assert dk.any()


def test_equal_weights_of_integers_are_exact() -> None:
    # q = 0 weighs 64 keys by 1/64 each, so the mean of small integers is exact.
    k = torch.randn(1, 1, 64, 16, dtype=BF16)
    v = torch.randint(-3, 4, (1, 1, 64, 16), generator=torch.Generator().manual_seed(1)).to(BF16)
    out = attend(torch.zeros(1, 2, 3, 16, dtype=BF16), k, v, Mask(causal=False))
    assert torch.equal(out.double(), v.double().mean(2, keepdim=True).expand(1, 2, 3, 16))


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_each_head_reads_its_own_group(groups: int) -> None:
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, groups, 5, 16)
    v = torch.arange(1.0, groups + 1).view(1, groups, 1, 1).expand(1, groups, 5, 16)
    out = attend(q, k, v, Mask())
    expected = torch.tensor([h // (4 // groups) + 1.0 for h in range(4)]).view(1, 4, 1, 1).expand_as(out)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("window", [1, 5, 33, 64, 200])
def test_window_has_exactly_its_width(window: int) -> None:
    q, v = torch.zeros(1, 1, 64, 64), torch.eye(64).view(1, 1, 64, 64)  # out[i, j] > 0 where query i sees key j
    out = attend(q, q, v, Mask(window=window))
    assert (out[0, 0] > 0).tolist() == [[i - window < j <= i for j in range(64)] for i in range(64)]


def test_the_future_and_other_documents_do_not_matter_to_a_bit() -> None:
    q, k, v = (x.detach() for x in CALLS["documents"].inputs())
    for mask, hidden in ((Mask(), 70), (Mask(segments_BS=IDS), 66)):
        other_k, other_v = k.clone(), v.clone()
        other_k[:, :, hidden:], other_v[:, :, hidden:] = 7.0, -3.0
        before, after = (attend(q, *kv, mask)[:, :, :hidden] for kv in ((k, v), (other_k, other_v)))
        assert torch.equal(before, after)


def test_two_halves_merge_by_their_lse() -> None:
    q, k, v = (x.detach() for x in Call(40, 70, Rules(), F32).inputs())
    whole = flash.attention(q, k, v, Mask(causal=False))
    parts = [flash.attention(q, k[:, :, part], v[:, :, part], Mask(causal=False), return_lse=True)
             for part in (slice(0, 20), slice(20, None))]  # fmt: skip
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), 0).unsqueeze(-1)
    merged = (torch.stack([out for out, _ in parts]) * weights).sum(0)
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=1e-5)


def test_nothing_is_added_in_any_order() -> None:
    for module in (flash.common, flash.forward_kernels, flash.backward_kernels):
        code = inspect.getsource(module).replace("no atomic operation", "").replace("atomically", "")
        assert "atomic" not in code
    first, second = (CALLS["causal"].run() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_tiles_do_not_matter_beyond_rounding() -> None:
    shipped = CALLS["window"]
    before = shipped.run()
    tiles.reset()
    tiles.bind({**TILES, **{name: tile for name, tile in some_tiles(64, 16).items() if name.endswith(".64")}})
    after = shipped.run()
    for name, (_, limit) in shipped.right().items():
        assert excess(after[name], before[name].double(), limit) <= 2, name


# ------------------------------------------------------------------------------------------------ layouts, bad input


def _packed(x: Tensor) -> Tensor:
    """A slice of a larger tensor, as of a packed projection."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 8), torch.nan, dtype=x.dtype)
    wide[..., 8 : 8 + x.shape[-1]] = x.detach()
    return wide[..., 8 : 8 + x.shape[-1]]


LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "packed": _packed,
    "head dim outermost": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "rows reversed in memory": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_nothing(layout: str) -> None:
    q, k, v = (x.detach() for x in CALLS["fewer queries"].inputs())
    dout, _ = CALLS["fewer queries"].given()
    found = []
    for laid in (lambda x: x, LAYOUTS[layout]):
        leaves = tuple(laid(x).detach().requires_grad_() for x in (q, k, v))
        out = attend(leaves[0], leaves[1], leaves[2], Mask())
        found.append((out, *torch.autograd.grad(out, leaves, laid(dout))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_expanded_gradient() -> None:
    q, k, v = CALLS["fewer queries"].inputs()
    out = attend(q, k, v, Mask())
    wanted = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_rows_that_are_too_far_apart_are_copied() -> None:
    far = torch.zeros(3, 2**23, dtype=BF16)[:, :16].view(1, 1, 3, 16)
    assert flash._dense(far).stride() == (48, 48, 16, 1)
    assert flash._like(far).is_contiguous()
    near = torch.zeros(1, 3, 2, 16).transpose(1, 2)
    assert flash._dense(near) is near
    assert flash._like(near).stride() == near.stride()


def test_a_result_lies_as_its_query() -> None:
    out = attend(*CALLS["causal"].inputs(), Mask())
    assert out.transpose(1, 2).is_contiguous()  # [B, S, H, D], so that a model reshapes it without a copy


@pytest.mark.parametrize(
    ("batch", "queries", "keys"), [(0, 3, 3), (1, 0, 3), (1, 3, 0), (0, 0, 0)], ids=lambda size: str(size)
)
@pytest.mark.parametrize("causal", [True, False])
def test_empty_tensors(batch: int, queries: int, keys: int, causal: bool) -> None:
    q = torch.randn(batch, 2, queries, 16, requires_grad=True)
    k, v = (torch.randn(batch, 1, keys, 16, requires_grad=True) for _ in range(2))
    out, lse = flash.attention(q, k, v, Mask(causal), return_lse=True)
    wanted, its_lse = reference(q, k, v, Mask(causal), return_lse=True)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, its_lse)
    found = torch.autograd.grad(out.sum(), (q, k, v))
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]
    assert not any(x.any() for x in found)


@pytest.mark.parametrize(
    ("q", "options", "words"),
    [
        (torch.zeros(1, 2, 3, 16, dtype=torch.float64), {}, "in float64; it takes bfloat16, float16, float32"),
        (torch.zeros(1, 2, 3, 264), {}, "heads of 264"),
        (torch.zeros(1, 2, 3, 16), {"v": torch.zeros(1, 2, 3, 24)}, "heads of 16 and values of 24"),
        (torch.zeros(1, 2, 3, 16), {"segments": torch.zeros(1, 3)}, "segment ids in torch.float32"),
        (torch.zeros(1, 1, 1, 16).expand(1, 1, 2**30 + 1, 16), {}, "1073741825 positions"),
    ],
)
def test_what_the_kernel_does_not_do_is_refused(q: Tensor, options: dict[str, Any], words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        flash.attention(q, q, options.get("v", q), Mask(segments_BS=options.get("segments")))


@pytest.mark.parametrize("bad", [{"window": 0}, {"causal": False, "window": 3}])
def test_a_mask_that_makes_no_sense_is_refused(bad: dict[str, Any]) -> None:
    q = torch.zeros(1, 2, 3, 16)
    with pytest.raises(ValueError, match="sliding window"):
        flash.attention(q, q, q, Mask(**bad))
    with pytest.raises(ValueError, match="softcap"):
        flash.attention(q, q, q, Mask(), softcap=0.0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int16, torch.int64])
def test_segment_ids_of_any_integer(dtype: torch.dtype) -> None:
    q, k, v = (x.detach() for x in Call(40, 40, Rules(), F32).inputs())
    ids = (torch.arange(40) >= 17).view(1, 40)
    wanted = flash.attention(q, k, v, Mask(segments_BS=ids.to(torch.int32)))
    found = flash.attention(q, k, v, Mask(segments_BS=ids.to(dtype)))
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(wanted))


def test_ids_beyond_int32_are_told_apart() -> None:
    call = Call(40, 40, Rules(causal=True, segments=torch.tensor([[0] * 10 + [2**32] * 10 + [2**33] * 20])))
    assert max(excesses(call).values()) <= 1


# ----------------------------------------------------------------------------------------- custom ops, compile, DTensor


OPTIONS = [(True, None, 0.25, None), (True, 7, 0.25, 3.0), (False, None, -0.25, None)]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_custom_ops_are_sound(options: tuple[Any, ...]) -> None:
    q, k, v = Call(20, 20, Rules(), F32, dim=16, heads=2).inputs()
    ids = torch.tensor([[0] * 8 + [1] * 12])
    torch.library.opcheck(torch.ops.accelbridge.flash_forward.default, (q, k, v, ids, *options))
    out, lse = (x.detach() for x in flash.flash_forward(q, k, v, ids, *options))
    leaves = (torch.randn_like(out), torch.randn_like(lse), *(x.detach() for x in (q, k, v)), out, lse, ids)
    torch.library.opcheck(torch.ops.accelbridge.flash_backward.default, (*leaves, *options))


def test_it_is_traced_whole() -> None:
    call = CALLS["documents, window"]
    q, k, v = call.inputs()
    dout, dlse = call.given()

    def step(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
        out, lse = flash.attention(q * 1.0, k, v, Mask(window=33, segments_BS=ids), return_lse=True)
        return (out * dout).sum().float() + (lse * dlse).sum()

    torch._dynamo.reset()
    traced = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = [(loss := each(q, k, v, IDS), *torch.autograd.grad(loss, (q, k, v))) for each in (step, traced)]
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=2**-6, atol=1e-3)


@pytest.fixture
def mesh(request: pytest.FixtureRequest):
    """Two devices that are not there: what is split evenly needs nothing of the other."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield dist.device_mesh.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1], ids=["batch", "heads"])
def test_parts_of_dtensors_are_calls_of_their_own(mesh: Any, dim: int) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    call = replace(CALLS["documents"], heads=2, groups=1)  # of this device: half of the heads, or of the batch
    plain = call.inputs()
    split = [DTensor.from_local(x, mesh, [Shard(dim)], run_check=False) for x in plain]
    ids = DTensor.from_local(IDS, mesh, [Shard(0) if dim == 0 else Replicate()], run_check=False)
    dout, dlse = call.given()
    found, wanted = (
        flash.attention(x[0], x[1], x[2], Mask(segments_BS=s), return_lse=True) for x, s in ((split, ids), (plain, IDS))
    )
    for whole, part in zip(found, wanted, strict=True):
        assert isinstance(whole, DTensor)
        assert whole.placements == (Shard(dim),)
        assert whole.shape[dim] == 2 * part.shape[dim]
        assert torch.equal(whole.to_local(), part)
    given = [DTensor.from_local(x, mesh, [Shard(dim)], run_check=False) for x in (dout, dlse)]
    gradients = torch.autograd.grad(found, split, given)
    for whole, part in zip(gradients, torch.autograd.grad(wanted, plain, (dout, dlse)), strict=True):
        assert isinstance(whole, DTensor)
        assert whole.placements == (Shard(dim),)
        assert torch.equal(whole.to_local(), part)


def test_heads_are_not_split_within_a_group(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    q, k, v = (distribute_tensor(x.detach(), mesh, [Replicate()]) for x in Call(20, 20, Rules(), F32).inputs())
    assert flash._splits(q._spec, k._spec, None) == [(Replicate(), None), (Shard(0), None)]  # one group, two devices
    two = distribute_tensor(torch.zeros(1, 2, 20, 64), mesh, [Replicate()])
    assert (Shard(1), Replicate()) in flash._splits(q._spec, two._spec, v._spec)


# --------------------------------------------------------------------------------------------------------- mutants


@dataclass(frozen=True)
class Mutant:
    """A defect of a kernel, as a change of its source, and the result that must leave its bound."""

    module: str
    old: str
    new: str
    seen: str
    call: str = "causal"


SLOPE = "        if SOFTCAP:\n            dscores *= 1.0 - capped * capped\n"
MUTANTS = {
    "wrong group": Mutant("forward", "query_head // (heads // groups)", "query_head % groups", "out"),
    "wrong group, dq": Mutant("backward", "query_head // (heads // groups)", "query_head % groups", "dq"),
    "missing last tile": Mutant("forward", "range(first, end, KEYS)", "range(first, end - KEYS, KEYS)", "out"),
    "missing last tile, dq": Mutant("backward", "range(first, end, KEYS)", "range(first, end - KEYS, KEYS)", "dq"),
    "missing last tile, dk": Mutant("backward", "range(members * steps)", "range(members * steps - 1)", "dk"),
    "only the first head of a group": Mutant("backward", "range(members * steps)", "range(steps)", "dv"),
    "no D term, dq": Mutant("backward", " - delta[:, None])", ")", "dq"),
    "no D term, dk": Mutant("backward", " - delta[None, :])", ")", "dk"),
    "gradient of lse ignored": Mutant("backward", "    if DLSE:\n", "    if False:\n", "dq"),
    "lse in base 2": Mutant("forward", "+ tl.math.log2(total)) * LN2", "+ tl.math.log2(total))", "lse"),
    "lse without the scale": Mutant("forward", "(peak * factor + ", "(peak * LOG2E + ", "lse"),
    "no rescaling": Mutant("forward", "out * shrink[:, None]", "out", "out"),
    "mask off by one": Mutant("common", "key <= place", "key < place", "out", "fewer queries"),
    "aligned top-left": Mutant("forward", "place = row + shift", "place = row", "out", "fewer queries"),
    "a window one wider": Mutant("common", "key > place - window", "key >= place - window", "out", "window"),
    "a window that begins a tile late": Mutant(
        "common", "first = tl.maximum(place - window + 1, 0) // KEYS * KEYS",
        "first = (tl.maximum(place - window + 1, 0) // KEYS + 1) * KEYS", "out", "window"),
    "tiles taken for whole": Mutant("common", "tl.maximum(place + 1, 0)", "tl.maximum(place + QUERIES, 0)", "out"),
    "documents not told apart": Mutant("common", "    if SEGMENTS:\n", "    if False:\n", "out", "documents"),
    "a span that begins late": Mutant(
        "common", "tl.min(tl.where(near, at, length), 0)", "tl.max(tl.where(near, at, 0), 0)", "out",
        "documents, both ways"),
    "no slope of the cap, dq": Mutant("backward", f"{SLOPE}        dq", "        dq", "dq", "softcap"),
    "no slope of the cap, dk": Mutant("backward", f"{SLOPE}        if DV", "        if DV", "dk", "softcap"),
    "tf32": Mutant("forward", ', input_precision="ieee"', "", "out", "causal, float32"),
    "tf32, dk": Mutant("backward", ', input_precision="ieee"', "", "dk", "causal, float32"),
    "blind rows take the last maximum": Mutant(
        "forward", "tl.where(risen == -INF, 0.0, risen)", "risen", "out", "more queries"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("name", sampled(MUTANTS))
def test_a_mutant_is_seen(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    if mutant.module == "common":  # the kernels read its functions as globals of their own
        changed = mutant_of(flash.common, mutant.old, mutant.new, tmp_path)
        monkeypatch.setattr(flash, "common", changed)
        for module in (flash.forward_kernels, flash.backward_kernels):
            for helper in ("sees", "key_ranges", "query_ranges"):
                if hasattr(module, helper):
                    monkeypatch.setattr(module, helper, getattr(changed, helper))
    else:
        place = f"{mutant.module}_kernels"
        monkeypatch.setattr(flash, place, mutant_of(getattr(flash, place), mutant.old, mutant.new, tmp_path))
    call = CALLS[mutant.call]
    assert excesses(call, backward=mutant.seen.startswith("d"))[mutant.seen] > 1
