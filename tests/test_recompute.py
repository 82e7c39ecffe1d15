"""Recomputation: what is kept falls, numbers don't change, ops run as often as said, and a budget is met."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop

from accelbridge import TrainConfig, Trainer, ops
from accelbridge.backend import World
from accelbridge.cpu.attention import sdpa
from accelbridge.errors import ConfigError
from accelbridge.memory import recompute
from accelbridge.memory.budget import Activations, choose, measure
from accelbridge.memory.choice import DEFAULT, Recompute
from accelbridge.memory.config import size_in_bytes
from accelbridge.models.config import ModelConfig
from accelbridge.models.decoder import Decoder
from accelbridge.parallel.layout import Layout
from accelbridge.train.prepare import prepare
from tests import cli
from tests.ranks import Rank, run_ranks

pytestmark = pytest.mark.usefixtures("unbound")

CONFIG = ModelConfig(vocab_size=64, dim=64, layers=3, heads=4, kv_heads=2, ffn_dim=192)
SHAPE = (2, 32)
NONE, FULL = Recompute(), Recompute("full")
CHEAP = Recompute("selective", ("rms_norm", "rope", "swiglu"))
WITHOUT_LINEAR = Recompute("selective", ("rms_norm", "rope", "attention", "swiglu"))
Bound = dict[str, Callable[..., Any]]
ATTENTION: Bound = {"sdpa": sdpa, "reference": ops.reference("attention")}


class Alive(TorchDispatchMode):
    """Bytes of all storages that were made while it is on and still live, each counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return result

    def bytes(self, without: list[Tensor]) -> int:
        known = {tensor.untyped_storage()._cdata for tensor in without}
        return sum(size for key, (alive, size) in self.made.items() if alive() is not None and key not in known)


def decoder(asked: Recompute, bound: Bound | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    """The small decoder with its layers recomputed as asked, ops counted or chosen by ``bound``."""
    ops.reset()
    ops.bind(bound or {})
    recompute.bind(asked, compiled=False)
    model = Decoder(CONFIG)
    model.reset_parameters(3)
    model.to(dtype)
    finish = recompute.finisher(asked, None)
    for index, layer in enumerate(model.layers):
        finish(f"layers.{index}", layer)
    return model


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and document ids."""
    made = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, CONFIG.vocab_size, SHAPE, generator=made)
    return tokens, torch.randint(0, 2, SHAPE, generator=made).cumsum(1)


def loss_of(model: nn.Module, segments: bool = True) -> Tensor:
    tokens, documents = batch()
    logits = model(tokens, documents if segments else None)
    return ops.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten(), -100)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def kept_bytes(asked: Recompute, bound: Bound | None = None, dtype: torch.dtype = torch.float32) -> int:
    model = decoder(asked, bound, dtype)
    with Alive() as alive:
        loss = loss_of(model)
    assert loss.requires_grad
    return alive.bytes(list(model.parameters()))


# ------------------------------------------------------------------------------------------- what it is for


@pytest.mark.parametrize("attention", ATTENTION)
def test_what_is_kept_falls_and_no_bit_changes(attention: str) -> None:
    bound: Bound = {"attention": ATTENTION[attention]}
    plain = decoder(NONE, bound)
    loss = loss_of(plain)
    expected = gradients(plain, loss)
    assert len(expected) == len(list(plain.parameters()))
    sizes = [kept_bytes(NONE, bound)]
    for asked in (CHEAP, WITHOUT_LINEAR, FULL):
        model = decoder(asked, bound)
        again = loss_of(model)
        assert torch.equal(again, loss)
        found = gradients(model, again)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        assert list(model.state_dict()) == list(plain.state_dict())
        sizes.append(kept_bytes(asked, bound))
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[1] < 0.75 * sizes[0]
    assert sizes[-1] < 0.2 * sizes[0]


def test_only_what_is_listed_runs_twice() -> None:
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return ops.reference(name)(*args, **kwargs)

        return call

    once = {"rms_norm": 6, "linear": 21, "rope": 6, "attention": 3, "swiglu": 3}
    outside = {"rms_norm": 1, "linear": 1, "embedding": 1, "cross_entropy": 1}
    for asked, repeated in ((NONE, ()), (CHEAP, CHEAP.ops), (WITHOUT_LINEAR, WITHOUT_LINEAR.ops), (FULL, tuple(once))):
        model = decoder(asked, {name: counted(name) for name in ops.NAMES})
        calls.clear()
        loss_of(model).backward()
        inside = {op: n * (1 + (op in repeated)) for op, n in once.items()}
        assert calls == Counter(outside) + Counter(inside), asked


def test_without_gradients_nothing_is_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(CHEAP)
    monkeypatch.setattr(recompute, "checkpoint", None)
    with torch.no_grad(), Alive() as alive:
        loss_of(model, segments=False)
    assert alive.bytes(list(model.parameters())) == 0


def test_the_first_units_only() -> None:
    part, whole, none = (kept_bytes(Recompute("full", units=n)) for n in (2, 3, 0))
    assert none == kept_bytes(NONE)
    assert whole == kept_bytes(FULL)
    assert none - part == pytest.approx(2 / 3 * (none - whole), rel=0.01)


# --------------------------------------------------------------------------------- whatever else a unit may be


class Block(nn.Module):
    """A user's layer: semantic ops beside plain torch, generators, keywords and another unit inside."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.drop = nn.Dropout(0.5)
        self.inner = inner

    def forward(self, x: Tensor, *, debug: float = 1.0) -> Tensor:
        hidden = self.drop(ops.swiglu(self.up(x), self.up(x)))
        x = x + debug * ops.linear(hidden, self.down.weight, self.down.bias)
        return x if self.inner is None else self.inner(x, debug=2.0)


def block_gradients(asked: Recompute, backwards: int = 1) -> list[Tensor]:
    ops.reset()
    recompute.bind(asked, compiled=False)
    torch.manual_seed(11)
    block = Block(Block())
    finish = recompute.finisher(asked, None)
    finish("outer", block)
    assert block.inner is not None
    finish("outer.inner", block.inner)
    x = torch.rand(4, 16, requires_grad=True)
    loss = block(x, debug=3.0).square().sum()
    torch.rand(7)  # the generator moves on before the unit runs again
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return [x.grad, *(p.grad for p in block.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("asked", [FULL, Recompute("selective", ("swiglu",)), Recompute("selective", ("linear",))])
@pytest.mark.parametrize("backwards", [1, 2])
def test_generators_keywords_nested_units_and_two_backward_passes(asked: Recompute, backwards: int) -> None:
    expected = block_gradients(NONE, backwards)
    assert all(torch.equal(a, b) for a, b in zip(block_gradients(asked, backwards), expected, strict=True))


def test_torch_told_not_to_stop_early() -> None:
    expected = gradients(plain := decoder(NONE), loss_of(plain))
    with set_checkpoint_early_stop(False):
        model = decoder(CHEAP)
        found = gradients(model, loss_of(model))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class Misbehaving(nn.Module):
    """Either writes into what an op put out, or calls other ops when it runs again."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.runs = way, 0
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        if self.way == "changes its mind" and self.runs > 1:
            x = ops.swiglu(x, x)
        x = ops.linear(x, self.weight)
        return x.add_(1).square() if self.way == "writes" else x.square()


@pytest.mark.parametrize(("way", "says"), [("writes", "changed in place"), ("changes its mind", "called swiglu where")])
def test_units_that_cannot_be_recomputed_are_told(way: str, says: str) -> None:
    asked = Recompute("selective", ("rms_norm",))
    recompute.bind(asked, compiled=False)
    unit = Misbehaving(way)
    recompute.apply(asked, unit)
    loss = unit(torch.ones(2, 8)).sum()
    with pytest.raises(RuntimeError, match=says):
        loss.backward()


# ----------------------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_predicted_is_what_is_kept(attention: str, dtype: str) -> None:
    implementation = ATTENTION[attention]
    ops.bind({"rope": len})  # whatever is bound stays bound, and does not matter
    found = measure(CONFIG, Layout(), SHAPE, dtype, {"attention": lambda: implementation}, segments=True)
    assert ops.bound()["rope"] is len
    assert found.notes == ()
    for asked in (NONE, CHEAP, WITHOUT_LINEAR, Recompute("selective", ("linear",)), FULL):
        layer = {"none": found.layer, "full": found.entry}.get(asked.kind, found.selective(asked.ops))
        kept = kept_bytes(asked, {"attention": implementation}, getattr(torch, dtype))
        assert found.outside + CONFIG.layers * layer == pytest.approx(kept, rel=0.1), asked


def test_an_implementation_without_shapes_is_measured_by_a_stand_in() -> None:
    def only_on_the_device(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("no kernel for this device")

    found = measure(CONFIG, Layout(), SHAPE, "float32", {"attention": lambda: only_on_the_device}, segments=False)
    fused = measure(CONFIG, Layout(), SHAPE, "float32", {"attention": lambda: sdpa}, segments=False)
    assert found.layer == fused.layer
    assert found.notes == (
        "attention measured by a stand-in, as its own kernel has no shapes to tell: no kernel for this device",
    )


def test_tensor_parallel_keeps_local_shapes() -> None:
    whole = measure(CONFIG, Layout(), SHAPE, "float32", {}, segments=False)
    half = measure(CONFIG, Layout(tp=2), SHAPE, "float32", {}, segments=False)
    sequence = measure(CONFIG, Layout(tp=2, sequence_parallel=True), SHAPE, "float32", {}, segments=False)
    hidden = SHAPE[0] * SHAPE[1] * CONFIG.dim * 4
    assert half.entry == whole.entry == hidden
    assert sequence.entry == hidden // 2
    assert sum(half.kept["swiglu"].values()) == sum(whole.kept["swiglu"].values()) // 2
    assert sum(half.kept["rms_norm"].values()) == sum(whole.kept["rms_norm"].values())
    assert sum(sequence.kept["rms_norm"].values()) == sum(half.kept["rms_norm"].values()) // 2
    assert sequence.layer < half.layer < whole.layer


def test_the_cheapest_choice_that_fits_is_taken() -> None:
    kept = {"a": {1: 100, 2: 300}, "b": {3: 200}, "c": {4: 1000}}
    made = Activations(outside=50, layer=1800, entry=10, kept=kept, flops={"a": 5, "b": 1, "c": 1000})
    layers, whole = 4, 50 + 4 * 1800
    options = [s for n in range(1, 4) for s in combinations("abc", n)]
    for budget in range(50 + 4 * 10, whole + 200, 37):
        chosen = choose(made, layers, budget)
        costs = [
            units * made.cost(s)
            for s in options
            for units in range(1, layers + 1)
            if whole - units * (made.layer - made.selective(s)) <= budget
        ]
        if chosen.kind == "none":
            assert whole <= budget
            continue
        assert chosen.units is not None
        recomputed = ("a", "b", "c") if chosen.kind == "full" else chosen.ops
        size = whole - chosen.units * (made.layer - made.selective(recomputed))
        assert size <= budget < whole
        assert chosen.units * made.cost(recomputed) == min(costs)
    with pytest.raises(ConfigError, match=r"89 bytes asked; the least is 90 bytes.* 4 layer inputs of 10"):
        choose(made, layers, 50 + 4 * 10 - 1)


# -------------------------------------------------------------------------------------------------- in a recipe


@pytest.mark.parametrize(
    ("text", "size"),
    [(1, 1), ("200MiB", 200 << 20), ("1.5GB", 1_500_000_000), ("7 kib", 7168), ("12", 12), ("3B", 3), (None, None)],
)
def test_sizes(text: Any, size: int | None) -> None:
    assert size_in_bytes(text) == size


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ({"budget": "200 apples"}, ['memory.recompute.budget asked as "200 apples"', "200MiB"]),
        ({"budget": 0}, ["memory.recompute.budget asked as 0", "above 0"]),
        ({"budget": True}, ["memory.recompute.budget asked as True (bool)"]),
        ({"budget": [1]}, ["memory.recompute.budget asked as [1] (list)"]),
        ({"budget": "9e99GB"}, ["memory.recompute.budget asked as"]),
        ({"ops": []}, ["memory.recompute", "recomputes nothing", "memory.recompute: none"]),
        ({"ops": "rope"}, ['memory.recompute.ops asked as "rope" (text)', "a list"]),
        ({}, ["memory.recompute", "neither is given"]),
        ({"ops": ["rope"], "budget": 5}, ["memory.recompute", "both is given"]),
        ({"op": ["rope"]}, ['unknown key "op" in memory.recompute', 'did you mean "ops"?']),
        ("ful", ['memory.recompute asked as "ful" (text)', "none, selective or full", 'did you mean "full"?']),
        (3, ["memory.recompute asked as 3 (integer)", "a section with keys of its own (ops, budget)"]),
    ],
)
def test_settings_that_cannot_be(setting: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.of({"memory": {"recompute": setting}})
    (line,) = str(caught.value).splitlines()
    for part in parts:
        assert part in line


def planned(folder: Path, store: Path, setting: Any, **sections: Any) -> Any:
    config = TrainConfig.of(cli.recipe(folder / "run", store, memory={"recompute": setting}, **sections))
    return prepare(config, World(), writes=False)


def test_the_plan_says_what_is_recomputed(tmp_path: Path, store: Path) -> None:
    def note(setting: Any) -> str:
        return "\n".join(n for n in planned(tmp_path, store, setting).plan.notes if n.startswith("recompute"))

    assert note("none") == ""
    assert note("full") == "recompute: every shard unit in full"
    assert note("selective") == "recompute: selective rms_norm, rope, swiglu; what linear, attention put out is kept"
    assert note({"ops": ["swiglu", "rms_norm"]}).startswith("recompute: selective rms_norm, swiglu; what linear, rope,")
    assert note({"budget": "1TB"}).startswith("recompute: none, ")
    plan = planned(tmp_path, store, {"budget": 700_000}).plan
    assert "units; activations " in plan.notes[-1]
    assert plan.notes[-1].endswith(" KiB of 683.6 KiB budget")
    assert plan.contract["recompute"]["units"] in (1, 2)
    digests = {planned(tmp_path, store, s).plan.digest for s in ("none", "full", {"budget": 700_000})}
    assert len(digests) == 3
    assert set(DEFAULT) & set(planned(tmp_path, store, "selective").recompute.ops) == set(CHEAP.ops)


class Flat(nn.Module):
    """A model of one's own without shard units; ``Stacked`` has some."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(257, 16), nn.Linear(16, 257)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens))


class Stacked(Flat):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])


@pytest.mark.parametrize(
    ("model", "memory", "says"),
    [
        (Flat, "full", "memory.recompute asked, which works on shard units; the model has none"),
        (Stacked, {"budget": 10**9}, "known only once it has run"),
        (Stacked, {"ops": ["rmsnorm"]}, 'did you mean "rms_norm"'),
    ],
)
def test_a_model_of_ones_own_is_refused_at_once(
    tmp_path: Path, store: Path, model: Callable[[], nn.Module], memory: Any, says: str
) -> None:
    recipe: dict[str, Any] = cli.recipe(tmp_path / "run", store, memory={"recompute": memory})
    del recipe["model"]
    with pytest.raises(ConfigError, match=says):
        Trainer(recipe, model=model())
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------- sharded

ACCUMULATING: dict[str, Any] = {"steps": 3, "eval_interval": 2, "microbatch_size": 2}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ZeRO 1": ({"parallel": {"zero": 1}}, {"selective": "selective"}),
    "ZeRO 2": ({"parallel": {"zero": 2}}, {"full": "full"}),
    "ZeRO 3": ({"precision": {"compute": "bfloat16"}}, {"full": "full", "selective": "selective"}),
    "replicated": ({"parallel": {"dp_replicate": 2}}, {"budget": {"budget": 160_000}}),
}
"""Sections of each layout, and the forms of recomputation to compare with none."""


def train_all(ctx: Rank, folder: Path, store: Path, validation: Path) -> dict[str, tuple[Any, ...]]:
    os.environ |= {name: str(ctx.rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(ctx.size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ctx.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found: dict[str, tuple[Any, ...]] = {}
    for layout, (sections, forms) in LAYOUTS.items():
        for form, setting in {"none": "none", **forms}.items():
            name = os.environ["TORCHELASTIC_RUN_ID"] = f"{layout}, {form}"
            settings = {"train": ACCUMULATING, "memory": {"recompute": setting}, "metrics": {"interval": 1}}
            recipe = cli.recipe(folder / name, store, **settings, **sections)
            recipe["data"]["validation"] = str(validation)
            trainer = Trainer(recipe)
            result = trainer.fit()
            chosen = trainer.prepared.recompute
            found[name] = (result.validation_loss, list(trainer.model.state_dict()), chosen.units)
    return found


def test_sharded_runs_keep_their_bits(tmp_path: Path, store: Path) -> None:
    validation = tmp_path / "short"
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a few words to look at between the steps " * 16)
    done = cli.run("data", "build", str(tmp_path / "text"), str(validation), "--suffix", ".txt")
    assert done.returncode == 0, done.stderr
    found, other = run_ranks(train_all, 2, tmp_path, store, validation / "train", timeout=240)
    assert found == other
    for layout, (_, forms) in LAYOUTS.items():
        lines = cli.steps_of(tmp_path / f"{layout}, none")
        assert len(lines) == 3
        for form in forms:
            name = f"{layout}, {form}"
            assert found[name][:2] == found[f"{layout}, none"][:2], name
            for step, line in cli.steps_of(tmp_path / name).items():
                assert (line["loss"], line["grad_norm"]) == (lines[step]["loss"], lines[step]["grad_norm"]), name
    assert found["replicated, budget"][2] in (1, 2)
