"""Dropout by hash: its bits, its statistics, and that neither layout nor recomputation nor compiling changes them."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from accelbridge import Trainer, ops
from accelbridge.backend import Mask
from accelbridge.errors import CheckpointError
from accelbridge.models import Decoder, Dropout, ModelConfig, name_sites
from accelbridge.models.decoder import Context
from accelbridge.models.requests import decoder_requests
from accelbridge.train.uncovered import coverage_notes
from tests import cli
from tests.scenes import same_bits

WORD = 1 << 32
SMALL: dict[str, Any] = {"vocab_size": 61, "dim": 16, "layers": 2, "heads": 2, "ffn_dim": 24}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Products this small only lose by being shared between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def site(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int32)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def kept(seed: int, step: int, sample_ids: Tensor, place: int, shape: tuple[int, ...], p: float) -> Tensor:
    """The mask, bool [B, *shape]."""
    keys = ops.dropout_keys(seed, step, sample_ids)
    return ops.dropout(torch.ones(len(keys), *shape), keys, site(place), p) != 0


# ------------------------------------------------------------------------------------------------------ the bits


def lowbias32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15
    x = x * 0x846CA68B % WORD
    return x ^ x >> 16


def unhash(x: int) -> int:
    """The number that lowbias32 sends to ``x``."""
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, WORD) % WORD
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, WORD) % WORD
    return x ^ x >> 16


def row_key(seed: int, step: int, sample: int) -> int:
    text = f"accelbridge dropout {seed} {step} {sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def drawn(key: int, place: int, *coordinates: int) -> int:
    """What element ``coordinates`` draws, as a signed number, in unsigned arithmetic of Python's integers."""
    word = lowbias32(key ^ place)
    for coordinate in coordinates:
        word = lowbias32(word ^ lowbias32(coordinate ^ place))
    return word - WORD if word >= WORD // 2 else word


GOLDEN = [
    # seed, step, sample id, site, coordinates, drawn
    (0, 0, 0, 0, (), 369904930),
    (0, 0, 0, 0, (0, 0), 1948059929),
    (7, 0, 0, 1, (0, 1), 1226680734),
    (7, 1, 0, 1, (1, 0), 1835085006),
    (7, 1, 2147483653, 2147483647, (511, 1023), -1135591088),
    (-3, 8589934592, 1099511627777, 305419896, (1073741824,), -1298827496),
    (2026, 999999, 123456789, 729683222, (4095, 3, 127), -225788790),
]


@pytest.mark.parametrize("golden", GOLDEN)
def test_the_bits_are_the_committed_ones(golden: tuple[int, int, int, int, tuple[int, ...], int]) -> None:
    seed, step, sample, place, coordinates, expected = golden
    keys = ops.dropout_keys(seed, step, ids(sample))
    assert int(keys.item()) % WORD == row_key(seed, step, sample)
    assert drawn(int(keys.item()) % WORD, place, *coordinates) == expected
    # A probability on either side of what was drawn decides about the element.
    share = (expected + WORD // 2) / WORD
    x = torch.ones(1, *(1 for _ in coordinates))
    below, above = (ops.dropout(x, keys, site(place), share + d / WORD, coordinates) for d in (0, 1))
    assert below.item() > 0
    assert above.item() == 0


def test_every_element_is_what_unsigned_arithmetic_draws() -> None:
    keys = ops.dropout_keys(11, 3, ids(0, 7, 1 << 40))
    place, p, shape = 0x7FFFFFFF, 0.37, (5, 4, 3)
    expected = torch.tensor(
        [
            [drawn(key % WORD, place, *where) >= p * WORD - WORD // 2 for where in np.ndindex(shape)]
            for key in keys.tolist()
        ]
    )
    assert torch.equal(kept(11, 3, ids(0, 7, 1 << 40), place, shape, p), expected.view(3, *shape))


@pytest.mark.parametrize("p", [2.0**-32, 2.0**-24, 0.1, 1 / 3, 0.5, 0.999, 1 - 2.0**-32])
def test_the_probability_is_exact(p: float) -> None:
    # Over all 2**32 words a bijection draws each number once: p is exact if the boundary lies where it should.
    boundary = round(p * WORD)
    words = [(rank + WORD // 2) % WORD for rank in (0, boundary - 1, boundary, WORD - 1)]
    keys = torch.from_numpy(np.array([unhash(word) for word in words], dtype=np.uint32).view(np.int32))
    assert [lowbias32(key % WORD) for key in keys.tolist()] == words
    assert (ops.dropout(torch.ones(4), keys, site(0), p) != 0).tolist() == [False, False, True, True]


def test_a_slice_draws_what_it_draws_within_the_whole() -> None:
    x, keys = torch.rand(4, 24, 40) + 1, ops.dropout_keys(0, 5, torch.arange(4))
    whole = ops.dropout(x, keys, site(9), 0.3)
    for rows, s, m in ((slice(1, 3), 0, 0), (slice(0, 4), 6, 8), (slice(3, 4), 12, 39)):
        part = ops.dropout(x[rows, s : s + 12, m : m + 8], keys[rows], site(9), 0.3, (s, m))
        assert torch.equal(part, whole[rows, s : s + 12, m : m + 8])
    turned = x.mT.contiguous()
    assert torch.equal(ops.dropout(x.mT, keys, site(9), 0.3, (0, 0)), ops.dropout(turned, keys, site(9), 0.3))


def test_row_keys_take_all_of_every_number() -> None:
    numbers = [0, 1, -1, 1 << 31, 1 << 32, (1 << 32) + 1, 1 << 62, (1 << 63) - 1]
    by_sample = ops.dropout_keys(0, 0, ids(*numbers))
    assert (by_sample.dtype, by_sample.shape, by_sample.device.type) == (torch.int32, (8,), "cpu")
    by_step = torch.cat([ops.dropout_keys(0, n, ids(0)) for n in numbers])
    by_seed = torch.cat([ops.dropout_keys(n, 0, ids(0)) for n in numbers])
    # All three begin with (0, 0, 0); nothing else coincides.
    assert len({*by_sample.tolist(), *by_step.tolist(), *by_seed.tolist()}) == 3 * len(numbers) - 2


# ------------------------------------------------------------------------------------------------ the statistics


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_kept_as_should_be(p: float) -> None:
    n, seeds = 4 * 48 * 64, 50
    counts = torch.stack([kept(seed, seed * 7, torch.arange(4), 5, (48, 64), p).sum() for seed in range(seeds)])
    z = (counts.double() - n * (1 - p)) / math.sqrt(n * p * (1 - p))
    assert z.abs().max() < 5
    # Neither too even nor too uneven: the sum of squares is chi-squared with mean 50 and deviation 10.
    assert 15 < z.square().sum() < 100


def uncorrelated(masks: Tensor, p: float) -> None:
    """Any two of ``masks [k, n]`` are independent as far as correlation can tell, within 5 deviations."""
    x = (masks.double() - (1 - p)) / math.sqrt(p * (1 - p))
    correlation = x @ x.T / math.sqrt(x.shape[1])
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rows_sites_steps_and_seeds_are_independent(p: float) -> None:
    some = torch.arange(8)
    by_step = torch.stack([kept(0, step, some, 3, (32, 64), p) for step in range(6)])
    uncorrelated(by_step.flatten(1), p)
    uncorrelated(by_step.transpose(0, 1).flatten(1), p)  # by row
    uncorrelated(by_step.permute(2, 0, 1, 3).flatten(1), p)  # by position
    uncorrelated(by_step.permute(3, 0, 1, 2).flatten(1), p)  # by feature
    uncorrelated(torch.stack([kept(0, 0, some, 1 << k, (32, 64), p) for k in range(6)]).flatten(1), p)
    uncorrelated(torch.stack([kept(seed, 0, some, 3, (32, 64), p) for seed in range(6)]).flatten(1), p)
    uncorrelated(torch.stack([kept(0, 0, some + (k << 32), 3, (32, 64), p) for k in range(6)]).flatten(1), p)


def test_positions_and_features_are_not_exchanged() -> None:
    square = kept(0, 0, torch.arange(8), 3, (64, 64), 0.5)
    uncorrelated(torch.stack([square.flatten(), square.mT.flatten()]), 0.5)


# ---------------------------------------------------------------------------------------------------- the numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_values_and_gradient_are_the_mask_over_one_minus_p(dtype: torch.dtype) -> None:
    p, keys = 0.25, ops.dropout_keys(1, 2, torch.arange(3))
    x = (torch.rand(3, 16, 32) + 0.5).to(dtype).requires_grad_()
    y = ops.dropout(x, keys, site(4), p)
    mask = kept(1, 2, torch.arange(3), 4, (16, 32), p)
    assert y.dtype == dtype
    ulp = 2 * torch.finfo(dtype).eps  # of the factor and of the product
    torch.testing.assert_close(y.double(), x.double() * mask / (1 - p), rtol=ulp, atol=0)
    assert torch.equal(y == 0, ~mask)
    weight = torch.randint(1, 9, x.shape).to(dtype)
    y.backward(weight)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), weight.double() * mask / (1 - p), rtol=ulp, atol=0)


def test_what_is_dropped_is_zero_whatever_it_was() -> None:
    x = torch.tensor([math.inf, math.nan, -math.inf, 2.0]).repeat(50)[None].requires_grad_()
    keys = ops.dropout_keys(1, 2, ids(0))
    y = ops.dropout(x, keys, site(4), 0.5)
    mask = kept(1, 2, ids(0), 4, (200,), 0.5)
    assert torch.equal(y == 0, ~mask)
    y.nan_to_num().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad[~mask], torch.zeros(int((~mask).sum())))


def test_nothing_dropped_is_the_identity() -> None:
    x = torch.rand(2, 3)
    assert ops.dropout(x, ops.dropout_keys(0, 0, torch.arange(2)), site(0), 0.0) is x


X, KEYS = torch.ones(2, 3, 4), torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.dropout(X, KEYS, site(0), 1.0), "below 1; found 1.0"),
        (lambda: ops.dropout(X, KEYS, site(0), math.nan), "found nan"),
        (lambda: ops.dropout(X.int(), KEYS, site(0), 0.1), r"floating dtype; found torch.int32 \(2, 3, 4\)"),
        (lambda: ops.dropout(torch.tensor(1.0), KEYS, site(0), 0.1), r"found torch.float32 \(\)"),
        (lambda: ops.dropout(X, KEYS[:1], site(0), 0.1), r"one int32 key per row of x; found keys torch.int32 \(1,\)"),
        (lambda: ops.dropout(X, KEYS.long(), site(0), 0.1), "found keys torch.int64"),
        (lambda: ops.dropout(X, KEYS, KEYS, 0.1), r"0-d int32 tensor; found torch.int32 \(2,\)"),
        (lambda: ops.dropout(X, KEYS, site(0), 0.1, (0,)), r"found starts \(0,\) and x \(2, 3, 4\)"),
        (lambda: ops.dropout(X, KEYS, site(0), 0.1, (0, -1)), r"found starts \(0, -1\)"),
        (lambda: Dropout(1.0), "below 1; found 1.0"),
        (lambda: Dropout(-0.1), "found -0.1"),
        (lambda: Dropout(0.1).place(0, 0, 4), "dimension 0 asked; it is the batch"),
        (lambda: Dropout(0.1).place(1, 8, 8), "a slice from 8 on asked; the whole dimension 1 is 8 long"),
    ],
)
def test_wrong_calls_say_what_is_wrong(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


# ---------------------------------------------------------------------------------------------------- the module


def named(p: float = 0.5, name: str = "here") -> Dropout:
    module = Dropout(p)
    module.name_site(name)
    return module


def test_without_stream_or_name_it_says_what_to_write() -> None:
    with pytest.raises(RuntimeError, match=r"no stream is open.*with ops.dropout_stream\(ops.dropout_keys\("):
        named()(X)
    with ops.dropout_stream(KEYS), pytest.raises(RuntimeError, match=r"has no name.*name_sites"):
        Dropout(0.5)(X)
    assert Dropout(0.5).eval()(X) is X
    assert Dropout(0.0)(X) is X


def test_streams_nest_and_close_behind_an_error() -> None:
    module, other = named(), KEYS + 1
    with ops.dropout_stream(KEYS):
        outer = module(X)
        with ops.dropout_stream(other):
            assert not torch.equal(module(X), outer)
        with pytest.raises(ValueError, match="one int32 key per row"), ops.dropout_stream(other[:1]):
            module(X)
        assert torch.equal(module(X), outer)
        with ops.dropout_stream(None), pytest.raises(RuntimeError, match="no stream is open"):
            module(X)
    with pytest.raises(RuntimeError, match="no stream is open"):
        module(X)


def test_a_site_is_its_name() -> None:
    model: Any = nn.ModuleDict(
        {"a": Dropout(0.5), "b": nn.Sequential(Dropout(0.0), Dropout(0.5)), "c": nn.Dropout(0.5)}
    )
    assert name_sites(model) == [model["a"], model["b"][1]]
    x, keys = torch.ones(2, 64), ops.dropout_keys(0, 0, torch.arange(2))
    with ops.dropout_stream(keys):
        a, b = model["a"](x), model["b"](x)
        assert not torch.equal(a, b)
        assert torch.equal(named(name="b.1")(x), b)
    number = int.from_bytes(hashlib.sha256(b"a").digest()[:4], "big") >> 1
    assert torch.equal(a != 0, kept(0, 0, torch.arange(2), number, (64,), 0.5))
    assert not model.state_dict()


def test_a_site_outlives_moves_and_copies() -> None:
    expected = named().site
    with torch.device("meta"):
        model: Any = nn.Sequential(Dropout(0.5), nn.Linear(3, 3))
    model[0].name_site("here")
    assert not any(b.is_meta for b in model.buffers())
    for moved in (
        model.to_empty(device="cpu"),
        copy.deepcopy(model),
        model.to("meta").to_empty(device="cpu"),
        model.to(torch.bfloat16),
    ):
        assert moved[0].site.item() == expected.item() != 0
        assert moved[0].site.dtype == torch.int32


def test_a_placed_module_draws_its_slice() -> None:
    x, keys = torch.rand(2, 8, 12) + 1, ops.dropout_keys(0, 0, torch.arange(2))
    module, part = named(), named()
    part.place(1, 4, 8)
    part.place(-1, 6, 12)
    with ops.dropout_stream(keys):
        assert torch.equal(part(x[:, 4:, 6:]), module(x)[:, 4:, 6:])
        with pytest.raises(ValueError, match=r"placed at 4 of 8 along dimension 1; found x \(2, 8, 12\)"):
            part(x)


def step(model: nn.Module, x: Tensor, number: int, run: Any = None) -> tuple[Tensor, list[Tensor | None]]:
    """Output and gradients of one step in a stream of its own."""
    model.zero_grad()
    with ops.dropout_stream(ops.dropout_keys(0, number, torch.arange(len(x)))):
        y = (run or model)(x)
        y.square().sum().backward()
    return y.detach(), [p.grad for p in model.parameters()]


def test_recomputation_draws_the_same_and_steps_do_not() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), Dropout(0.5), nn.Linear(40, 6), Dropout(0.2))
    name_sites(model)
    x = torch.randn(5, 6)
    y, grads = step(model, x, 1)
    for reentrant in (False, True):
        given = x.clone().requires_grad_()  # reentrant checkpointing asks for an input with gradient
        again, recomputed = step(model, given, 1, lambda x, r=reentrant: checkpoint(model, x, use_reentrant=r))
        assert torch.equal(y, again)
        assert all(torch.equal(a, b) for a, b in zip(grads, recomputed, strict=True))  # type: ignore[arg-type]
    assert not torch.equal(y, step(model, x, 2)[0])


def test_compiled_layers_share_a_graph_over_layers_and_steps() -> None:
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**{**SMALL, "layers": 12}, dropout=0.2))
    counter = CompileCounter()
    compiled = copy.deepcopy(model)
    for layer in compiled.layers:
        layer.compile(backend=counter, fullgraph=True)
    tokens = torch.randint(0, 61, (3, 8))
    counts = []
    for number in range(4):
        expected, found = step(model, tokens, number), step(compiled, tokens, number)
        assert torch.equal(found[0], expected[0])
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))  # type: ignore[arg-type]
        counts.append(counter.frame_count)
    assert counts == [1] * 4


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_generated_code_draws_the_same() -> None:
    # Products of int32 overflow here, which C++ leaves undefined.
    def drop(x: Tensor, keys: Tensor, place: Tensor) -> Tensor:
        return ops.dropout(x, keys, place, 0.1)

    x, keys = torch.rand(3, 7, 13) + 1, ops.dropout_keys(0, 1, torch.arange(3))
    compiled = torch.compile(drop, fullgraph=True, dynamic=False)
    assert torch.equal(compiled(x, keys, site(77)), drop(x, keys, site(77)))


# --------------------------------------------------------------------------------------------------- the decoder


@pytest.mark.parametrize("p", [1.0, -0.1, math.nan])
def test_a_wrong_share_is_refused(p: float) -> None:
    with pytest.raises(ValidationError, match=f"dropout must be at least 0 and below 1; found {p}"):
        ModelConfig(**SMALL, dropout=p)


def test_the_decoder_drops_what_it_says() -> None:
    model = Decoder(ModelConfig(**SMALL, dropout=0.1))
    names = [name for name, module in model.named_modules() if isinstance(module, Dropout)]
    blocks = [f"layers.{i}.{kind}_dropout" for i in range(2) for kind in ("attention", "ffn")]
    assert names == ["embed_dropout", *blocks]
    plain = Decoder(ModelConfig(**SMALL))
    assert not any(isinstance(module, Dropout) for module in plain.modules())
    assert model.state_dict().keys() == plain.state_dict().keys()
    plain.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 61, (2, 8))
    assert torch.equal(model.eval()(tokens), plain(tokens))


def test_a_layer_adds_dropped_blocks_to_what_was_there() -> None:
    torch.manual_seed(0)
    layer: Any = Decoder(ModelConfig(**SMALL, dropout=0.5)).layers[0]
    x, context = torch.randn(2, 8, 16), Context(*ops.rope_table(torch.arange(8), 8), Mask(causal=True))
    with ops.dropout_stream(ops.dropout_keys(0, 0, torch.arange(2))):
        middle = x + layer.attention_dropout(layer.attention(layer.attention_norm(x), context))
        assert torch.equal(layer(x, context), middle + layer.ffn_dropout(layer.ffn(layer.ffn_norm(middle))))
    assert layer.attention_dropout.site != layer.ffn_dropout.site


def test_the_plan_asks_for_it_where_it_is_used() -> None:
    asked = [
        {request.op for request in decoder_requests(ModelConfig(**SMALL, dropout=p), "float32", 8, False)}
        for p in (0.0, 0.1)
    ]
    assert asked[1] - asked[0] == {"dropout"}
    assert asked[0] < asked[1]


def test_torch_dropout_is_noted_with_the_way_out() -> None:
    assert coverage_notes(nn.Sequential(named())) == []
    found = " ".join(coverage_notes(nn.Sequential(nn.Dropout(0.1))))
    assert "its masks depend on the layout; those of accelbridge.models.Dropout don't" in found


# --------------------------------------------------------------------------------------------------- the trainer
# Layouts with dropout are rows of tests/parity.py.

DROPPING: dict[str, Any] = {"model": {"dropout": 0.1}, "train": {"steps": 6}, "metrics": {"interval": 3}}


def dropping(**sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: DROPPING.get(name, {}) | sections.get(name, {}) for name in DROPPING.keys() | sections.keys()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    """Runs of the same recipe, one of them without dropout."""
    folder = tmp_path_factory.mktemp("dropping")
    Trainer(cli.recipe(folder / "reference", store, **dropping(checkpoint={"interval": 3, "keep": 9}))).fit()
    Trainer(cli.recipe(folder / "nothing dropped", store, **dropping(model={"dropout": 0.0}))).fit()
    return folder


def test_something_is_dropped(folder: Path) -> None:
    dropped, whole = (cli.steps_of(folder / name)[1]["grad_norm"] for name in ("reference", "nothing dropped"))
    assert dropped != pytest.approx(whole, rel=1e-3)


def test_a_resume_is_bitwise(folder: Path, store: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "reference" / "checkpoints" / "step_3", tmp_path / "resumed" / "checkpoints" / "step_3")
    Trainer(cli.recipe(tmp_path / "resumed", store, **dropping()), resume="auto").fit()
    ours, theirs = cli.steps_of(tmp_path / "resumed"), cli.steps_of(folder / "reference")
    assert {s: line["loss"] for s, line in ours.items()} == {s: theirs[s]["loss"] for s in range(4, 7)}
    last = Path("checkpoints") / "step_6"
    same_bits(tmp_path / "resumed" / last, folder / "reference" / last)


class Tokens:
    """24 samples of 8 random tokens."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 19, (9,), generator=torch.Generator().manual_seed(index))
        return {"tokens": tokens[:-1], "targets": tokens[1:]}


def test_the_trainer_draws_by_seed_step_and_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, make = [], ops.dropout_keys

    def spy(seed: int, step: int, sample_ids: Tensor) -> Tensor:
        asked.append((seed, step, sample_ids.tolist()))
        return make(seed, step, sample_ids)

    monkeypatch.setattr(ops, "dropout_keys", spy)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(19, 8), Dropout(0.3), nn.Linear(8, 19))
    recipe = {
        "train": {"steps": 2, "seq_len": 8, "global_batch_size": 6, "microbatch_size": 3, "seed": 5},
        "output": {"dir": str(tmp_path / "run")},
    }
    data: Any = Tokens()
    with Trainer(recipe, model=model, data=data, validation=data) as trainer:
        assert [choice.implementation for choice in trainer.plan.ops if choice.op == "dropout"] == ["reference"]
        evaluation = trainer.evaluate()
        assert evaluation == trainer.evaluate()  # nothing dropped, and no stream needed
        assert not asked
        trainer.fit()
    assert asked == [(5, s, list(range(6 * s + 3 * m, 6 * s + 3 * m + 3))) for s in range(2) for m in range(2)]


def test_a_checkpoint_from_before_dropout_resumes_without_it(folder: Path, store: Path, tmp_path: Path) -> None:
    old = tmp_path / "old" / "checkpoints" / "step_6"
    shutil.copytree(folder / "nothing dropped" / "checkpoints" / "step_6", old)
    manifest = json.loads((old / "manifest.json").read_text())
    del manifest["model"]["dropout"]
    (old / "manifest.json").write_text(json.dumps(manifest))
    sections = dropping(model={"dropout": 0.0}, train={"steps": 7})
    assert Trainer(cli.recipe(tmp_path / "old", store, **sections), resume="auto").step == 6
    with pytest.raises(CheckpointError, match=r"model.dropout is 0.0 there, 0.1 here"):
        Trainer(cli.recipe(tmp_path / "old", store, **dropping(train={"steps": 7})), resume="auto")
