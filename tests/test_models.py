"""The decoder and its configuration, and initial values that don't depend on slicing."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from accelbridge import ops
from accelbridge.models.config import ModelConfig
from accelbridge.models.decoder import Context, Decoder, Layer
from accelbridge.models.init import Init, default_init, initial_values


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Products this small only lose by being shared between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SMALL: dict[str, Any] = {"vocab_size": 61, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2}


def decoder(**changes: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(ModelConfig(**{**SMALL, **changes}))


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------------------- config


def test_defaults_resolve() -> None:
    config = ModelConfig(vocab_size=10, dim=96, layers=1, heads=4)
    assert (config.resolved_kv_heads, config.resolved_head_dim, config.resolved_ffn_dim) == (4, 24, 256)
    config = ModelConfig(vocab_size=10, dim=96, layers=1, heads=4, kv_heads=1, head_dim=8, ffn_dim=7)
    assert (config.resolved_kv_heads, config.resolved_head_dim, config.resolved_ffn_dim) == (1, 8, 7)
    # 8/3 of 72 is exactly 192, and one more needs the next multiple of 64.
    assert [
        ModelConfig(**{**SMALL, "dim": d, "heads": 1, "kv_heads": 1, "head_dim": 2}).resolved_ffn_dim for d in (72, 73)
    ] == [192, 256]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dim": 0}, "dim must be positive; found 0"),
        ({"layers": -1}, "layers must be positive; found -1"),
        ({"norm_eps": float("nan")}, "norm_eps must be positive"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"window": 0}, "window must be positive"),
        ({"kv_heads": 3}, "heads=4, kv_heads=3; set kv_heads to one of 1, 2, 4"),
        ({"dim": 34}, "dim=34, heads=4"),
        ({"head_dim": 5}, "head_dim must be even.*found 5"),
        ({"dim": 12}, "head_dim must be even.*found 3"),
        ({"dims": 12}, "dims"),
        ({"dim": "12"}, "dim"),
    ],
)
def test_wrong_configs_say_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ModelConfig(**{**SMALL, **changes})


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_embeddings": True}, {"kv_heads": None}, {"head_dim": 10, "ffn_dim": 24}, {"layers": 3}],
)
def test_counts_are_those_of_the_module(changes: dict[str, Any]) -> None:
    model = decoder(**changes)
    config = model.config
    assert config.parameter_count() == sum(p.numel() for p in model.parameters())
    multiplying = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    if config.tie_embeddings:
        multiplying += model.embed.weight.numel()
    attention = 12 * config.layers * config.heads * config.resolved_head_dim * 100
    assert config.flops_per_token(100) == 6 * multiplying + attention


# ---------------------------------------------------------------------------------------------------- decoder


def test_parameters_have_the_promised_names() -> None:
    layer = [f"attention.{x}" for x in "qkvo"] + [f"ffn.{x}" for x in ("gate", "up", "down")]
    layer += ["attention_norm", "ffn_norm"]
    expected = {f"layers.{i}.{name}.weight" for i in (0, 1) for name in layer}
    expected |= {"embed.weight", "norm.weight", "head.weight"}
    assert {name for name, _ in decoder().named_parameters()} == expected
    assert set(decoder().state_dict()) == expected
    assert {name for name, _ in decoder(tie_embeddings=True).named_parameters()} == expected - {"head.weight"}


def plain(model: Decoder, tokens_BS: Tensor) -> Tensor:
    """The same decoder in float64 and one expression after the other, on no code of the package."""
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    config, x = model.config, weights["embed.weight"][tokens_BS]
    B, S, D = *tokens_BS.shape, config.resolved_head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name + ".weight"]

    def project(x: Tensor, name: str) -> Tensor:
        return torch.einsum("bsi,oi->bso", x, weights[name + ".weight"])

    angle = torch.arange(S).double()[:, None] * config.rope_theta ** (-torch.arange(0, D, 2).double() / D)
    turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]

    def heads(x: Tensor, rotate: bool) -> Tensor:
        x = x.reshape(B, S, -1, D)
        if rotate:
            z = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
            x = torch.cat((z.real, z.imag), -1)
        return x.repeat_interleave(config.heads // x.shape[2], 2)

    for i in range(config.layers):
        at = f"layers.{i}."
        y = norm(x, at + "attention_norm")
        q, k, v = (heads(project(y, f"{at}attention.{n}"), n != "v") for n in "qkv")
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
        scores = scores.masked_fill(torch.ones(S, S).triu(1).bool(), -math.inf)
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).reshape(B, S, -1)
        x = x + project(y, at + "attention.o")
        y = norm(x, at + "ffn_norm")
        gate = project(y, at + "ffn.gate")
        x = x + project(gate * gate.sigmoid() * project(y, at + "ffn.up"), at + "ffn.down")
    head = "embed" if config.tie_embeddings else "head"
    return project(norm(x, "norm"), head)


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1, "tie_embeddings": True}, {"kv_heads": 4, "head_dim": 6}])
def test_logits_equal_the_plain_expression(changes: dict[str, Any]) -> None:
    model = decoder(**changes)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3).add_(torch.randn_like(p), alpha=0.05)  # so that every part matters, and no two norms are equal
        logits = model(tokens())
    assert logits.dtype == torch.float32
    assert torch.allclose(logits.double(), plain(model, tokens()), rtol=1e-4, atol=1e-4)


def test_the_future_does_not_matter_to_a_bit() -> None:
    model, before = decoder(), tokens()
    after = before.clone()
    after[:, 10:] = (after[:, 10:] + 1) % 61
    assert torch.equal(model(before)[:, :10], model(after)[:, :10])
    assert not torch.allclose(model(before)[:, 10], model(after)[:, 10])


def test_documents_do_not_see_each_other() -> None:
    model, packed = decoder(), tokens(1, 24)
    segments = torch.tensor([[7] * 9 + [3] * 15])
    logits = model(packed, segments)
    other = packed.clone()
    other[:, :9] = (other[:, :9] + 1) % 61
    assert torch.equal(model(other, segments)[:, 9:], logits[:, 9:])
    # Alone, at other positions: rotary attention depends on differences only.
    assert torch.allclose(model(packed[:, 9:]), logits[:, 9:], atol=1e-5)
    assert torch.allclose(model(packed[:, :9]), logits[:, :9], atol=1e-5)


def test_window_limits_what_a_token_sees() -> None:
    model, before = decoder(layers=1, window=4), tokens(1)
    after = before.clone()
    after[:, 5] = (after[:, 5] + 1) % 61
    changed = (model(before) != model(after)).any(-1)[0].nonzero().flatten().tolist()
    assert changed == [5, 6, 7, 8]


def test_softcap_reaches_attention() -> None:
    plain_model, capped = decoder(), decoder(softcap=0.01)
    capped.load_state_dict(plain_model.state_dict())
    assert not torch.equal(plain_model(tokens()), capped(tokens()))


def test_meta_build_holds_nothing_and_fills_like_a_real_one() -> None:
    with torch.device("meta"):
        model = decoder(tie_embeddings=True)
    assert all(p.is_meta for p in model.parameters())
    assert not list(model.buffers())
    assert model(tokens().to("meta")).shape == (2, 24, 61)
    model.to_empty(device="cpu")
    model.reset_parameters(0)
    assert model.head.weight is model.embed.weight
    real = decoder(tie_embeddings=True)
    assert torch.equal(model(tokens()), real(tokens()))
    for name, p in real.named_parameters():
        assert torch.equal(p, initial_values(0, name, tuple(p.shape), range(len(p)), real.initialiser(name)))


def test_tied_weights_are_one_parameter_in_copies_too() -> None:
    model = copy.deepcopy(decoder(tie_embeddings=True))
    assert model.head.weight is model.embed.weight
    model(tokens()).sum().backward()
    assert model.embed.weight.grad is not None
    before = model.head.weight.detach().clone()
    with torch.no_grad():
        model.embed.weight.add_(1)
    assert torch.equal(model.head.weight, before + 1)


def test_every_parameter_gets_a_gradient_and_training_learns() -> None:
    model, batch = decoder(), tokens(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = ops.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) / batch[:, 1:].numel()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.any() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(61), abs=0.1)
    assert losses[-1] < losses[0] / 4


def test_modules_work_on_shards_of_their_heads() -> None:
    """Two halves of the heads and of the ffn, each a module of its own, add up to the whole branches."""
    model = decoder()
    layer = model.layers[0]
    assert isinstance(layer, Layer)
    shards = [copy.deepcopy(layer) for _ in range(2)]
    with torch.no_grad():
        for i, shard in enumerate(shards):
            for name, p in shard.named_parameters():
                kind = name.split(".")[-2]
                if kind in ("q", "k", "v", "gate", "up"):
                    owner = shard.get_submodule(name.removesuffix(".weight"))
                    owner.weight = nn.Parameter(p.chunk(2, 0)[i].clone())
                elif kind in ("o", "down"):
                    owner = shard.get_submodule(name.removesuffix(".weight"))
                    owner.weight = nn.Parameter(p.chunk(2, 1)[i].clone())
    contexts: list[Any] = []
    handle = layer.register_forward_hook(lambda module, args, out: contexts.append(args))
    model(tokens())
    handle.remove()
    x, context = contexts[0]
    first, second = shards
    summed = first.attention(x, context) + second.attention(x, context)
    assert torch.allclose(summed, layer.attention(x, context), atol=1e-6)
    assert torch.allclose(first.ffn(x) + second.ffn(x), layer.ffn(x), atol=1e-6)


def test_compiles_without_a_break() -> None:
    model = decoder(window=5)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    segments = torch.zeros(2, 24, dtype=torch.long)
    assert torch.equal(compiled(tokens(), segments), model(tokens(), segments))


def test_works_in_bfloat16() -> None:
    model = decoder()
    exact = model(tokens())
    logits = model.to(torch.bfloat16)(tokens())
    assert logits.dtype == torch.bfloat16
    assert torch.allclose(logits.float(), exact, atol=0.05 * exact.abs().max().item())


def test_rotations_are_hidden_from_wrappers_that_cast_arguments() -> None:
    from torch.distributed.utils import _apply_to_tensors  # what fully_shard casts a unit's arguments with

    seen: list[Any] = []
    model = decoder()
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args))
    model(tokens())
    x, context = _apply_to_tensors(lambda t: t.bfloat16(), seen[0])
    assert x.dtype == torch.bfloat16
    assert isinstance(context, Context)
    assert context.cos_SP.dtype == context.sin_SP.dtype == torch.float32


def test_statements_for_plan_and_sharding() -> None:
    assert decoder().attention_needs() == {"causal", "gqa"}
    full = decoder(window=3, softcap=1.0, kv_heads=None)
    assert full.attention_needs(segments=True) == {"causal", "window", "softcap", "segments"}
    spec = decoder().sharding_spec()
    assert [name for name, _ in decoder().named_modules() if spec.is_unit(name)] == ["layers.0", "layers.1"]


def test_initialiser() -> None:
    model = decoder()
    kinds = {name: model.initialiser(name) for name, _ in model.named_parameters()}
    assert kinds["layers.1.ffn_norm.weight"] == kinds["norm.weight"] == Init("ones")
    assert kinds["embed.weight"] == kinds["head.weight"] == kinds["layers.0.attention.q.weight"] == Init("normal", 0.02)
    assert kinds["layers.0.attention.o.weight"] == kinds["layers.1.ffn.down.weight"] == Init("normal", 0.01)
    with pytest.raises(ValueError, match=r"layers\.0\.other\.weight"):
        model.initialiser("layers.0.other.weight")


# --------------------------------------------------------------------------------------------- initial values

NORMAL = Init("normal", 1.0)


@pytest.mark.parametrize("kind", ["normal", "uniform", "ones", "zeros"])
@pytest.mark.parametrize("shape", [(257, 131), (13, 3, 5), (70001,), (1,), (4, 0), (0, 3)])
def test_slices_are_bits_of_the_whole(kind: Any, shape: tuple[int, ...]) -> None:
    init = Init(kind, 0.3)
    whole = initial_values(1, "a.weight", shape, range(shape[0]), init)
    assert whole.shape == shape
    assert whole.dtype == torch.float32
    cuts = sorted({0, 1, 2, 7, shape[0] // 3, shape[0] - 1, shape[0]} & set(range(shape[0] + 1)))
    for start in cuts:
        for stop in (c for c in cuts if c >= start):
            part = initial_values(1, "a.weight", shape, range(start, stop), init)
            assert torch.equal(part, whole[start:stop])


def test_scalars_and_empty_ranges() -> None:
    scalar = initial_values(1, "s", (), range(1), NORMAL)
    assert scalar.shape == ()
    assert scalar == initial_values(1, "s", (9,), range(1), NORMAL)[0]
    assert initial_values(1, "s", (), range(0), NORMAL).shape == (0,)
    assert initial_values(1, "s", (4, 5), range(4, 4), NORMAL).shape == (0, 5)
    assert initial_values(1, "s", (4, 5), range(9, 9), NORMAL).shape == (0, 5)


@pytest.mark.parametrize("rows", [range(5), range(3, 5), range(-1, 2), range(0, 4, 2)])
def test_rows_outside_are_an_error(rows: range) -> None:
    with pytest.raises(ValueError, match=r"w has rows 0\.\.4"):
        initial_values(1, "w", (4, 2), rows, NORMAL)


def test_words_are_philox() -> None:
    # Random123's known answer for philox4x64-10, counter 0 and key 0; numpy counts up before it draws.
    words = np.random.Philox(key=0, counter=2**256 - 1).random_raw(4)
    assert [f"{w:016x}" for w in words] == [
        "16554d9eca36314c",
        "db20fe9d672d0fdc",
        "d7e772cee186176b",
        "7e68b68aec7ba23b",
    ]


def test_streams_differ_by_seed_and_name() -> None:
    made = [
        initial_values(s, n, (64,), range(64), NORMAL)
        for s, n in ((0, "a"), (1, "a"), (0, "b"), (-1, "a"), (2**70, "a"))
    ]
    assert len({tuple(x.tolist()) for x in made}) == 5


def test_moments() -> None:
    n = 1_000_000
    x = initial_values(3, "m", (n,), range(n), Init("normal", 0.5)).double() / 0.5
    # Five standard errors of mean, variance, skewness and kurtosis of a normal sample.
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 5 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((x[1:] * x[:-1]).mean()) < 5 / math.sqrt(n)
    assert 4 < x.abs().max() < 6.8
    u = initial_values(3, "u", (n,), range(n), Init("uniform", 0.25)).double() / 0.25
    assert u.min() >= -1
    assert u.max() <= 1
    assert abs(u.mean()) < 5 / math.sqrt(3 * n)
    assert abs((u**2).mean() - 1 / 3) < 5 * math.sqrt(4 / 45 / n)


def test_default_init_follows_torch() -> None:
    class Own(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.weight)

    with torch.device("meta"):
        linear, norm = nn.Linear(16, 4), nn.LayerNorm(4)
        assert default_init(linear, "weight") == default_init(linear, "bias") == Init("uniform", 0.25)
        assert default_init(nn.Embedding(5, 3), "weight") == NORMAL
        assert default_init(nn.Embedding(5, 3, padding_idx=0), "weight") is None
        for module in (norm, nn.GroupNorm(2, 4)):
            assert default_init(module, "weight") == Init("ones")
            assert default_init(module, "bias") == Init("zeros")
        assert default_init(nn.RMSNorm(4), "weight") == Init("ones")
        assert default_init(nn.Bilinear(2, 2, 2), "weight") is None
        assert default_init(Own(16, 4), "weight") is None
    # The same bounds as torch's own values have.
    real = nn.Linear(16, 4000)
    for p in (real.weight, real.bias):
        assert 0.24 < p.abs().max() <= 0.25
