"""Tensor parallelism as its users meet it: their own modules, Hugging Face's, odd sizes, and what is refused.

What the decoder's layouts do to the numbers of a run is measured by tests/parity; here every tensor's gradient is
compared with that of the plain module in float64, on one device.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import traceback

from accelbridge import Trainer, load_backend, ops
from accelbridge.backend import Execution, Precision, World
from accelbridge.checkpoint.manifest import complete
from accelbridge.errors import ConfigError
from accelbridge.models import Decoder, Dropout, ModelConfig
from accelbridge.models.init import Init, initial_values
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import ShardingSpec
from accelbridge.portable.process_group import InterposedGroup
from accelbridge.train.build import initialiser, sharding_spec
from accelbridge.train.loss import NextTokenLoss, gather_split
from tests.parity.measure import Tensors, relative, whole
from tests.ranks import Rank, run_ranks
from tests.scenes import tensors

SEED = 11
VOCABULARY, SEQUENCE, ROWS = 12, 8, 8
PADDING = 3
FLOAT32 = 5e-5
"""Relative to the norm of a tensor: norms over 3 elements make float32 lose a digit. A part that is missing or counted
twice is 1e4 times as much."""


# ------------------------------------------------------------------------------------------------ a user's module


@dataclass(frozen=True)
class Sizes:
    dim: int = 10
    heads: int = 4
    head_dim: int = 3
    ffn: int = 12
    column_bias: bool = True


class Attention(nn.Module):
    """Biased projections, and norms of queries and keys per head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        width = sizes.heads * sizes.head_dim
        self.q, self.k, self.v = (nn.Linear(sizes.dim, width, bias=sizes.column_bias) for _ in range(3))
        self.q_norm, self.k_norm = nn.LayerNorm(sizes.head_dim), nn.RMSNorm(sizes.head_dim)
        self.o = nn.Linear(width, sizes.dim)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        q, k, v = (p(x).view(B, S, -1, self.head_dim) for p in (self.q, self.k, self.v))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, -1))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, gated: bool) -> None:
        super().__init__()
        self.norm, self.ffn_norm = nn.LayerNorm(sizes.dim), nn.RMSNorm(sizes.dim)
        self.attention = Attention(sizes)
        up = nn.Linear(sizes.dim, sizes.ffn, bias=sizes.column_bias)
        self.ffn = nn.Sequential(up, nn.GELU(), nn.Linear(sizes.ffn, sizes.dim))
        self.gate = nn.Linear(sizes.dim, 1) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention(self.norm(x))
        x = x + (y if self.gate is None else y * torch.sigmoid(self.gate(x)))
        return x + self.ffn(self.ffn_norm(x))


class Net(nn.Module):
    """``gated``: with what works on whole activations, which sequence parallelism has none of."""

    def __init__(self, sizes: Sizes, gated: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, sizes.dim, padding_idx=PADDING)
        self.blocks = nn.ModuleList(Block(sizes, gated) for _ in range(2))
        self.norm = nn.LayerNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, VOCABULARY)
        self.scale = nn.Parameter(torch.ones(1)) if gated else None
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x if self.scale is None else x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def initialiser(self, name: str) -> Init:
        return Init("normal", 0.4)

    def sharding_spec(self) -> ShardingSpec:
        styles = {
            "": "replicated",
            "embed": "vocab_embedding",
            "blocks.*.norm": "hidden",
            "blocks.*.ffn_norm": "hidden",
            "blocks.*.attention": "enter",
            "blocks.*.attention.[qkv]": "column",
            "blocks.*.attention.?_norm": "heads",
            "blocks.*.attention.o": "row",
            "blocks.*.ffn.0": "column",
            "blocks.*.ffn.2": "row",
            "blocks.*.gate": "replicated",
            "norm": "hidden",
            "head": "vocab_head",
        }
        if self.scale is None:
            del styles[""]
        return ShardingSpec(("blocks.*",), styles)


def values(model: nn.Module) -> Tensors:
    """What :class:`Net` starts with."""
    rule = Init("normal", 0.4)
    return {n: initial_values(SEED, n, tuple(p.shape), range(p.shape[0]), rule) for n, p in model.named_parameters()}


def batch(seed: int = 1, vocabulary: int = VOCABULARY) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (ROWS, SEQUENCE), generator=generator)
    tokens[:, 2] = PADDING
    targets = torch.randint(0, vocabulary, (ROWS, SEQUENCE), generator=generator)
    targets[tokens > vocabulary - 3] = -100
    targets[0] = -100
    return {"tokens": tokens, "targets": targets, "segments": torch.zeros_like(tokens)}


def plain_gradients(
    model: nn.Module, whole_batch: Mapping[str, Tensor], dtype: torch.dtype = torch.float64
) -> tuple[float, Tensors]:
    """Loss and gradients of a module that nothing has touched."""
    model = copy.deepcopy(model).to(dtype)
    output = model(whole_batch["tokens"])
    logits = getattr(output, "logits", output)
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    targets = whole_batch["targets"]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (targets != -100).sum()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


# -------------------------------------------------------------------------------------------------- running it


@contextmanager
def started(ctx: Rank, name: str, check: bool = False, **degrees: Any) -> Iterator[Execution]:
    """The eager execution in one layout; several may follow each other in one process."""
    execution = load_backend("cpu").execution
    world = World(ctx.rank, ctx.size, ctx.rank, ctx.size, run_id=name)
    execution.start(ctx.store(), world, Layout(**degrees), 60.0, check)
    try:
        yield execution
    finally:
        execution.close()


FLOAT = Precision("float32", "float32", "float32")


def realised(
    execution: Execution, model: nn.Module, precision: Precision = FLOAT, spec: ShardingSpec | None = None
) -> nn.Module:
    return execution.realise(model, spec or sharding_spec(model, Layout()), precision, initialiser(model, SEED))


def backward(
    execution: Execution, model: nn.Module, data: Tensors, degrees: Mapping[str, Any], count: int = 1
) -> float:
    """The mean loss over all replicas, with its gradients left in the model."""
    ways = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    here = execution.data_coordinates.start
    mine = {name: t.chunk(ways)[here].chunk(count) for name, t in data.items()}
    loss = NextTokenLoss(model)
    targets = execution.sum(sum((loss.count({"targets": t}) for t in mine["targets"]), torch.zeros(())))
    total = torch.zeros(())
    for index in range(count):
        with execution.microbatch(model, index, count):
            part = loss(model, {name: t[index] for name, t in mine.items()}) / targets
            part.backward()
        total += part.detach()
    return execution.sum(total).item()


def check_gradients(name: str, model: nn.Module, expected: Tensors, bound: float = FLOAT32) -> None:
    """Every expected one is there and no other, and each is within ``bound`` of its norm; one that nearly cancels, of
    that of a thousandth of the whole gradient, since its own is no measure of its rounding errors."""
    found = {key: whole(p.grad) for key, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys(), name
    least = 1e-3 * torch.stack([t.double().norm() for t in expected.values()]).norm()
    wrong = {
        key: float(error)
        for key, want in expected.items()
        if not (error := (found[key].double() - want.double()).norm() / max(want.double().norm(), least)) < bound
    }
    assert not wrong, (name, wrong)


def as_one_device(ctx: Rank, name: str, make: Callable[[], nn.Module], count: int = 1, **degrees: Any) -> None:
    """Split, filled on the meta device, run and compared: values bit by bit, loss and gradients in float64."""
    reference = make()
    reference.load_state_dict(values(reference), strict=False)  # a tied head has its embedding's
    loss, gradients = plain_gradients(reference, batch())
    with started(ctx, name, **degrees) as execution:
        with torch.device("meta"):
            model = make()
        realised(execution, model)
        for key, tensor in model.named_parameters():
            assert torch.equal(whole(tensor), reference.get_parameter(key)), (name, key)
        assert backward(execution, model, batch(), degrees, count) == pytest.approx(loss, rel=1e-6), name
        check_gradients(name, model, gradients)


# ---------------------------------------------------------------------------------------------------- the loss

EXTREMES = ("plain", "ignored nowhere", "ignored everywhere", "bfloat16", "huge", "masked columns", "float64")


def logits_for(kind: str) -> tuple[Tensor, Tensor]:
    """Logits [24, 16] and targets, which every rank makes alike."""
    generator = torch.Generator().manual_seed(EXTREMES.index(kind))
    logits = torch.randn(24, 16, generator=generator) * 4
    targets = torch.randint(0, 8, (24,), generator=generator) * 2  # even ones
    if kind != "ignored nowhere":
        targets[::5] = -100
    if kind == "ignored everywhere":
        targets[:] = -100
    if kind == "huge":
        logits = logits.sign() * 1e4 + logits
    if kind == "masked columns":
        logits[:, 1::2] = -torch.inf
        logits[:, 8:] = -torch.inf  # all that some ranks hold
        targets[targets >= 8] -= 8
    dtype = {"bfloat16": torch.bfloat16, "float64": torch.float64}.get(kind, torch.float32)
    return logits.to(dtype), targets


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def losses_of_split_logits(ctx: Rank) -> dict[str, tuple[float, float]]:
    """Relative errors of loss and gradient against float64, by kind."""
    found = {}
    with started(ctx, "losses", tp=ctx.size):
        for kind in EXTREMES:
            logits, targets = logits_for(kind)
            exact = logits.double().clone().requires_grad_()
            expected = F.cross_entropy(exact, targets, reduction="sum")
            (3 * expected).backward()
            mine = logits.chunk(ctx.size, 1)[ctx.rank].clone().requires_grad_()
            loss = ops.vocab_parallel_cross_entropy(mine, targets, _world())
            (3 * loss).backward()
            assert loss.dtype == torch.promote_types(logits.dtype, torch.float32)
            assert mine.grad is not None
            assert exact.grad is not None
            assert mine.grad.dtype == logits.dtype
            part = exact.grad.chunk(ctx.size, 1)[ctx.rank]
            error = abs(loss.item() - expected.item()) / max(abs(expected.item()), 1e-30)
            found[kind] = error, (mine.grad.double() - part).abs().max().item()
        unknown = torch.full((24,), 16)
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            ops.vocab_parallel_cross_entropy(torch.zeros(24, 16 // ctx.size), unknown, _world())
    return found


@contextmanager
def recorded() -> Iterator[list[tuple[str, int]]]:
    """What goes through the groups of an execution that was started with ``check``: (op, bytes handed over)."""
    calls: list[tuple[str, int]] = []
    run = InterposedGroup._run

    def record(self: InterposedGroup, call: Any) -> Any:
        given = list(call.tensors()) if call.inputs is None else list(_flat(call.inputs))
        calls.append((call.op, sum(t.numel() * t.element_size() for t in given)))
        return run(self, call)

    with mock.patch.object(InterposedGroup, "_run", record):
        yield calls


def _flat(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    else:
        for item in nested or ():
            yield from _flat(item)


def bytes_of_the_loss(ctx: Rank) -> list[tuple[str, int]]:
    logits, targets = logits_for("plain")
    mine = logits.chunk(ctx.size, 1)[ctx.rank].clone().requires_grad_()
    with started(ctx, "bytes", check=True, tp=ctx.size), recorded() as calls:
        ops.vocab_parallel_cross_entropy(mine, targets, _world()).backward()
    return calls


def bytes_of_a_step(ctx: Rank) -> tuple[int, int]:
    """The largest call of forward, loss and backward over a vocabulary of 4096, and the bytes of its local logits."""
    config = ModelConfig(vocab_size=4096, dim=8, layers=1, heads=4, ffn_dim=8)
    degrees = {"tp": ctx.size}
    with started(ctx, "step bytes", check=True, **degrees) as execution:
        with torch.device("meta"):
            model = Decoder(config)
        realised(execution, model)
        with recorded() as calls:
            backward(execution, model, batch(vocabulary=4096), degrees)
        assert calls
    return max(size for _, size in calls), ROWS * SEQUENCE * 4096 // ctx.size * 4


# ------------------------------------------------------------------------------------------------ norms, frozen parts


def exact_norm(ctx: Rank, name: str, make: Callable[[], nn.Module], **degrees: Any) -> None:
    """The norm against float64 over gathered gradients, and what clipping leaves; then a NaN on one rank."""
    with started(ctx, name, **degrees) as execution:
        with torch.device("meta"):
            model = make()
        for frozen in FROZEN:
            model.get_parameter(frozen).requires_grad_(False)
        realised(execution, model)
        backward(execution, model, batch(), degrees)
        before = {n: whole(p.grad).double() for n, p in model.named_parameters() if p.grad is not None}
        assert not before.keys() & set(FROZEN)
        expected = math.sqrt(sum(g.square().sum().item() for g in before.values()))
        found = execution.clip_grad_norm(model, expected / 2)
        assert found.item() == pytest.approx(expected, rel=1e-6), name
        check_gradients(name, model, {n: g / 2 for n, g in before.items()}, 1e-5)
        if ctx.rank == ctx.size - 1:
            gradient = model.get_parameter("blocks.1.attention.o.weight").grad
            assert isinstance(gradient, DTensor)
            gradient.to_local().view(-1)[0] = torch.nan
        assert execution.clip_grad_norm(model, 1.0).isnan(), name
        for parameter in model.parameters():
            assert parameter.grad is None or whole(parameter.grad).isnan().all(), name


FROZEN = (
    "blocks.0.attention.q.weight",
    "blocks.0.norm.weight",
    "blocks.1.attention.k_norm.weight",
    "blocks.1.ffn.2.bias",
)


def frozen_parameters(ctx: Rank, **degrees: Any) -> None:
    model = Net(Sizes())
    model.load_state_dict(values(model))
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    _, gradients = plain_gradients(model, batch())
    assert not gradients.keys() & set(FROZEN)
    with started(ctx, f"frozen {degrees}", **degrees) as execution:
        realised(execution, model)
        backward(execution, model, batch(), degrees)
        check_gradients("frozen", model, gradients)


# ------------------------------------------------------------------------------------------------- evaluation, dtypes


def evaluation(ctx: Rank, **degrees: Any) -> None:
    """Without gradients the loss is the same, whether or not a step came before, and training goes on after it."""
    with started(ctx, f"evaluation {degrees}", **degrees) as execution:
        gated = not degrees.get("sequence_parallel")
        model = Net(Sizes(), gated)
        model.load_state_dict(values(model))
        loss, gradients = plain_gradients(model, batch())
        realised(execution, model)
        criterion = NextTokenLoss(model)
        data = batch()

        def evaluated() -> float:
            with execution.evaluation(model):
                assert not model.training
                total = criterion(model, data)
                assert not total.requires_grad
            assert model.training
            return (total / criterion.count(data)).item()

        assert evaluated() == pytest.approx(loss, rel=1e-6)
        assert backward(execution, model, data, degrees) == pytest.approx(loss, rel=1e-6)
        check_gradients("evaluation", model, gradients)
        assert evaluated() == pytest.approx(loss, rel=1e-6)


def narrow(ctx: Rank, dtype: str, **degrees: Any) -> None:
    """16 bits: as near to float64 as the plain module is in 16 bits, with gradients in float32."""
    model = Net(Sizes(dim=16, head_dim=16, ffn=32), not degrees.get("sequence_parallel"))
    model.load_state_dict(values(model))
    loss, gradients = plain_gradients(model, batch())
    _, rounded = plain_gradients(model, batch(), getattr(torch, dtype))
    usual = max(relative(rounded[name], gradients[name]) for name in gradients)
    with started(ctx, f"{dtype} {degrees}", **degrees) as execution:
        realised(execution, model, Precision(dtype, "float32", "float32"))
        assert backward(execution, model, batch(), degrees) == pytest.approx(loss, rel=0.02)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            assert relative(whole(parameter.grad), gradients[name]) < 2 * usual, (dtype, name, usual)
        assert usual < 0.3


# ---------------------------------------------------------------------------------------------------------- refusals


def refused_at_run_time(ctx: Rank) -> dict[str, str]:
    """Messages of what only the data can show, by what was wrong."""
    told = {}
    degrees = {"tp": ctx.size, "sequence_parallel": True}
    with started(ctx, "refused", **degrees) as execution:
        model = realised(execution, Net(Sizes(), gated=False))
        with pytest.raises(ConfigError) as error:
            model(torch.zeros(2, SEQUENCE - 1, dtype=torch.int64))
        told["sequence"] = str(error.value)
    with started(ctx, "refused, flat", **degrees) as execution:
        model = realised(execution, Net(Sizes(), gated=False))
        with pytest.raises(ConfigError) as error:
            model(torch.zeros(SEQUENCE, dtype=torch.int64))
        told["flat"] = str(error.value)
    with started(ctx, "refused, tokens", tp=ctx.size) as execution:
        model = realised(execution, Net(Sizes()))
        for token in (-1, VOCABULARY):
            with pytest.raises((IndexError, RuntimeError)) as out:
                model(torch.full((2, SEQUENCE), token))
            told[f"token {token}"] = str(out.value)
    return told


# ------------------------------------------------------------------------------------------------------ Hugging Face


def hugging_face(kind: str, **changes: Any) -> nn.Module:
    import transformers

    torch.manual_seed(5)
    small: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **changes,
    }
    grouped = {"num_key_value_heads": 2, "head_dim": 4} | {k: small.pop(k) for k in changes if k.startswith("num_key")}
    configs = {
        "llama": lambda: transformers.LlamaConfig(**grouped, **small),
        "qwen3": lambda: transformers.Qwen3Config(**grouped, tie_word_embeddings=True, **small),
        "gpt_neox": lambda: transformers.GPTNeoXConfig(**small),
        "phi": lambda: transformers.PhiConfig(**small),
        "phi3": lambda: transformers.Phi3Config(num_key_value_heads=2, **small),
        "mixtral": lambda: transformers.MixtralConfig(**grouped, num_local_experts=2, **small),
        "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_head=4, n_embd=16, vocab_size=VOCABULARY),
    }
    return transformers.AutoModelForCausalLM.from_config(configs[kind]())


SPLIT = ("llama", "qwen3", "gpt_neox", "phi")


def hugging_face_as_one_device(ctx: Rank, kind: str, **degrees: Any) -> None:
    model = hugging_face(kind)
    with torch.no_grad():  # their initialisation is so small that logits hardly depend on the layers
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    loss, gradients = plain_gradients(model, batch())
    with started(ctx, f"{kind} {degrees}", **degrees) as execution:
        spec = sharding_spec(model, Layout(**degrees))
        model.register_forward_hook(lambda *of: of[2].logits)
        realised(execution, model, spec=spec)
        assert backward(execution, model, batch(), degrees) == pytest.approx(loss, rel=1e-6), kind
        check_gradients(kind, model, gradients)


# --------------------------------------------------------------------------------------------------------- trainers


class Samples:
    """Token samples of every kind the models here take."""

    def __init__(self, sequence: int = SEQUENCE) -> None:
        generator = torch.Generator().manual_seed(2)
        self.numbers = torch.randint(0, VOCABULARY, (48, sequence + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Tensors:
        tokens, targets = self.numbers[index, :-1], self.numbers[index, 1:]
        return {"tokens": tokens, "targets": targets, "segments": torch.zeros_like(tokens)}


@dataclass
class Scores:
    """What a model may return: a dataclass, which holds its logits."""

    scores: Tensor
    steps: int = field(default=0)


class Scored(Net):
    def forward(self, tokens: Tensor) -> Any:
        return Scores(super().forward(tokens))


class OwnLoss:
    """A loss of a user's own, on whole logits: with label smoothing."""

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        output = model(batch["tokens"])
        logits = output.scores if isinstance(output, Scores) else output
        assert type(logits) is Tensor
        assert logits.shape[-1] == VOCABULARY
        targets = batch["targets"].flatten()
        return F.cross_entropy(logits.flatten(0, 1), targets, reduction="sum", label_smoothing=0.1)

    def count(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.tensor(batch["targets"].numel())


DECODER = {"vocab_size": VOCABULARY, "dim": 16, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_dim": 24}


def recipe(output: Path, steps: int = 3, **sections: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "train": {"steps": steps, "global_batch_size": 8, "seq_len": SEQUENCE, "seed": 5},
        "optimizer": {"lr": 1e-2},
        "metrics": {"interval": 1},
        "output": {"dir": str(output)},
    }
    for name, changes in sections.items():
        base[name] = base.get(name, {}) | changes
    return base


def fitted(folder: Path, name: str, model: nn.Module | None = None, loss: Any = None, **sections: Any) -> list[float]:
    """Losses of a short run; ``model`` None is the recipe's decoder."""
    os.environ["TORCHELASTIC_RUN_ID"] = name.replace(" ", "-")
    if model is None:
        sections = {"model": DECODER, **sections}
    found = []
    with Trainer(recipe(folder / name, **sections), model=model, data=Samples(), loss=loss) as trainer:
        trainer.setup()
        for step in range(3):
            trainer.step = step
            found.append(trainer.execution.sum(trainer.train_step(trainer.loader.step(step))["loss"]).item())
    return found


def _own(kind: type[Net], gated: bool = True) -> Net:
    model = kind(Sizes(), gated)
    model.load_state_dict(values(model))
    return model


def trainers_one_after_another(ctx: Rank, folder: Path) -> dict[str, list[float]]:
    """Runs in one process, each in a layout of its own."""
    ctx.launched()
    torch.compile = partial(torch.compile, backend="aot_eager")  # generated code is tests/test_compile.py's
    sequence = {"tp": 2, "sequence_parallel": True}
    compiled = "selective" if hasattr(traceback, "annotate") else "full"  # torch below 2.10 refuses the other
    runs: dict[str, dict[str, Any]] = {
        "shard": {},
        "tp": {"parallel": {"tp": 2}},
        "sequence": {"parallel": sequence},
        "full": {"parallel": sequence, "memory": {"recompute": "full"}},
        "selective": {"parallel": sequence, "memory": {"recompute": "selective"}},
        "replicate": {"parallel": {"dp_replicate": 2}},
        "compiled": {"parallel": sequence, "train": {"compile": True}, "memory": {"recompute": compiled}},
        "own loss": {"model": None, "own": _own(Net), "loss": OwnLoss(), "parallel": {"tp": 2}},
        "own loss, sequence": {"own": _own(Net, gated=False), "loss": OwnLoss(), "parallel": sequence},
        "own loss, dataclass": {"own": _own(Scored), "loss": OwnLoss(), "parallel": {"tp": 2}},
        "float16": {"own": _own(Net), "parallel": {"tp": 2}, "precision": {"compute": "float16"}},
    }
    found = {}
    for name, sections in runs.items():
        sections.pop("model", None)
        found[name] = fitted(folder, name, sections.pop("own", None), sections.pop("loss", None), **sections)
    return found


# ------------------------------------------------------------------------------------------------------- checkpoints


def moved(folder: Path, name: str, source: str, **parallel: Any) -> str:
    """Read the checkpoint of run ``source`` in another layout, save it from there, and say what differs."""
    os.environ["TORCHELASTIC_RUN_ID"] = name.replace(" ", "-")
    start = complete(folder / source / "checkpoints")[-1] if source else None
    settings = recipe(folder / name, parallel=parallel)
    model = Net(Sizes(), gated=True, tied=True)
    model.load_state_dict(values(model), strict=False)
    with Trainer(settings, model=model, data=Samples(), resume=str(start) if start else "none") as trainer:
        trainer.setup()
        for step in range(trainer.step, 3):
            trainer.train_step(trainer.loader.step(step))
            trainer.step += 1
        trainer.save()
        trainer.checkpointer.wait()
    if start is None:
        return ""
    ours, theirs = (
        {n: t for n, t in tensors(path).items() if not n.startswith("rng.")}
        for path in (complete(folder / name / "checkpoints")[-1], start)
    )
    assert any(n.startswith("optimizer.") for n in ours)
    assert ours.keys() == theirs.keys()
    return next((n for n in theirs if not torch.equal(ours[n], theirs[n])), "")


# ------------------------------------------------------------------------------------------------------------ worlds


@dataclass
class Found:
    """What the ranks of a world saw that a test looks at."""

    errors: dict[str, tuple[float, float]]
    calls: list[tuple[str, int]]
    step: tuple[int, int]
    told: dict[str, str] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    differs: dict[str, str] = field(default_factory=dict)


SEQUENCE_PARALLEL = {"sequence_parallel": True}


def on_two(ctx: Rank, folder: Path, transformers: bool) -> Found:
    found = Found(losses_of_split_logits(ctx), bytes_of_the_loss(ctx), bytes_of_a_step(ctx))
    as_one_device(ctx, "own", lambda: Net(Sizes()), tp=2)
    as_one_device(ctx, "own, sequence", lambda: Net(Sizes(), gated=False), tp=2, **SEQUENCE_PARALLEL)
    as_one_device(ctx, "own, tied", lambda: Net(Sizes(), gated=False, tied=True), 2, tp=2, **SEQUENCE_PARALLEL)
    frozen_parameters(ctx, tp=2)
    evaluation(ctx, tp=2)
    evaluation(ctx, tp=2, **SEQUENCE_PARALLEL)
    for dtype in ("bfloat16", "float16"):
        narrow(ctx, dtype, tp=2)
        narrow(ctx, dtype, tp=2, **SEQUENCE_PARALLEL)
    as_shown(ctx)
    found.told = refused_at_run_time(ctx)
    if transformers:
        for kind in SPLIT:
            hugging_face_as_one_device(ctx, kind, tp=2)
    found.losses = trainers_one_after_another(ctx, folder)
    found.differs["1 device -> tp 2"] = moved(folder, "tp 2", "one", tp=2)
    return found


ODD = Sizes(heads=2, head_dim=3, ffn=6, column_bias=False)
"""Parts of columns have 3 rows, which two shards can't share."""


def on_four(ctx: Rank, folder: Path) -> Found:
    found = Found(losses_of_split_logits(ctx), bytes_of_the_loss(ctx), bytes_of_a_step(ctx))
    as_one_device(ctx, "tp 4", lambda: Net(Sizes()), tp=4)
    as_one_device(ctx, "tp 4, sequence", lambda: Net(Sizes(), gated=False), tp=4, **SEQUENCE_PARALLEL)
    for zero in (1, 2, 3):
        as_one_device(ctx, f"2x2, ZeRO {zero}", lambda: Net(Sizes()), 2, dp_shard=2, tp=2, zero=zero)
    as_one_device(ctx, "odd", lambda: Net(ODD), dp_shard=2, tp=2)
    as_one_device(ctx, "odd, tied", lambda: Net(ODD, tied=True), 2, dp_shard=2, tp=2, zero=1)
    as_one_device(ctx, "odd, sequence", lambda: Net(ODD, gated=False), 2, dp_shard=2, tp=2, zero=1, **SEQUENCE_PARALLEL)
    as_one_device(ctx, "replicate", lambda: Net(Sizes()), 2, dp_replicate=2, tp=2)
    frozen_parameters(ctx, dp_shard=2, tp=2)
    exact_norm(ctx, "norm 2x2", lambda: Net(ODD, tied=True), dp_shard=2, tp=2)
    exact_norm(ctx, "norm, sequence", lambda: Net(Sizes(), False, True), dp_replicate=2, tp=2, **SEQUENCE_PARALLEL)
    ctx.launched()
    moved(folder, "2x2", "", dp_shard=2, tp=2)
    found.differs["shard 2 x tp 2 -> tp 4"] = moved(folder, "tp 4", "2x2", dp_shard=1, tp=4)
    return found


def on_eight(ctx: Rank) -> None:
    exact_norm(ctx, "norm", lambda: Net(Sizes(), tied=True), dp_replicate=2, dp_shard=2, tp=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tensor-parallel")


@pytest.fixture(scope="module")
def four(folder: Path) -> list[Found]:
    return run_ranks(on_four, 4, folder, timeout=200)


@pytest.fixture(scope="module")
def one(folder: Path, four: list[Found]) -> str:
    """What is lost where one device reads the checkpoint of four."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCELBRIDGE_BACKEND"):
            patch.delenv(name, raising=False)
        patch.setenv("TORCHELASTIC_RUN_ID", "one")
        return moved(folder, "one", "tp 4")


@pytest.fixture(scope="module")
def two(folder: Path, one: str) -> list[Found]:
    return run_ranks(on_two, 2, folder, bool(find_spec("transformers")), timeout=300)


# ----------------------------------------------------------------------------------------------------- what they saw


def test_gradients_of_every_tensor_are_those_of_one_device(two: list[Found], four: list[Found]) -> None:
    """Asserted in the ranks: values bit by bit, gradients in float64, frozen parameters, evaluation, 16 bits, norms."""
    assert len(two) == 2
    assert len(four) == 4


@pytest.mark.full
def test_the_norm_of_replicate_by_shard_by_tp_is_exact() -> None:
    run_ranks(on_eight, 8, timeout=120)


@pytest.mark.parametrize("kind", EXTREMES)
def test_loss_of_a_split_vocabulary(kind: str, two: list[Found], four: list[Found]) -> None:
    """A float32 that sums to thousands has 1e-7 of them; gradients are at most 3."""
    bound = {"bfloat16": 2.0**-7, "float64": 1e-14}.get(kind, 2e-6)
    for found in two + four:
        loss, gradient = found.errors[kind]
        assert loss <= (1e-14 if kind == "float64" else 1e-6)
        assert gradient <= bound


def test_logits_never_travel(two: list[Found], four: list[Found]) -> None:
    for found in two + four:
        assert found.calls == [("allreduce", 24 * 4), ("allreduce", 2 * 24 * 4)]
        largest, logits = found.step
        assert largest < logits / 2  # torch 2.9 hands the gradients of the root to a group of one: 2 x 4096 x 8 / tp


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        (
            "sequence",
            ["parallel.sequence_parallel asked", "a sequence of 7 tokens is not a multiple of tp 2", "pad it"],
        ),
        ("flat", ["parallel.sequence_parallel asked", "(8, 10)", "residual stream [B, S, ...]"]),
        ("token -1", ["index out of range"]),
        (f"token {VOCABULARY}", ["index out of range"]),
    ],
)
def test_what_only_data_can_show_is_refused_at_run_time(what: str, parts: list[str], two: list[Found]) -> None:
    for found in two:
        for part in parts:
            assert part in found.told[what]


@pytest.mark.parametrize("name", ["shard", "tp", "sequence", "full", "selective", "replicate", "compiled"])
def test_trainers_in_one_process_agree_whatever_their_layouts(name: str, two: list[Found]) -> None:
    for found in two:
        assert found.losses[name] == pytest.approx(found.losses["tp"], rel=1e-5)
        assert found.losses["full"] == found.losses["selective"] == found.losses["sequence"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ACCELBRIDGE_BACKEND"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("gated", [True, False])
def test_a_loss_of_ones_own_sees_whole_logits(gated: bool, two: list[Found], tmp_path: Path) -> None:
    expected = fitted(tmp_path, "alone", _own(Net, gated), OwnLoss())
    for found in two:
        for name in ("own loss", "own loss, dataclass") if gated else ("own loss, sequence",):
            assert found.losses[name] == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("alone")
def test_float16_trains_as_float32(two: list[Found], tmp_path: Path) -> None:
    expected = fitted(tmp_path, "alone", _own(Net))
    for found in two:
        assert found.losses["float16"] == pytest.approx(expected, rel=0.02)


def test_checkpoints_move_between_degrees(one: str, two: list[Found], four: list[Found]) -> None:
    """shard 2 x tp 2 -> tp 4 -> 1 device -> tp 2, bit by bit."""
    assert one == ""
    assert [found.differs for found in four] == [{"shard 2 x tp 2 -> tp 4": ""}] * 4
    assert [found.differs for found in two] == [{"1 device -> tp 2": ""}] * 2


# ------------------------------------------------------------------------------------ refused before anything starts


class Bare(nn.Module):
    """Says nothing of how it may be split."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 10)
        self.places = nn.Embedding(SEQUENCE + 1, 10)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 10)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(10))
        self.head = nn.Linear(10, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1])).unsqueeze(0)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x * self.scale)


def told(model: nn.Module, sequence_parallel: bool = False, **degrees: Any) -> str:
    with pytest.raises(ConfigError) as error:
        sharding_spec(model, Layout(**{"tp": 2, **degrees}, sequence_parallel=sequence_parallel))
    return str(error.value)


def pasted(message: str) -> ShardingSpec:
    """What a message shows to write, written."""
    _, _, code = message.partition("ShardingSpec:\n")
    scope: dict[str, Any] = {"ShardingSpec": ShardingSpec}
    exec("class Pasted:\n" + code, scope)
    return scope["Pasted"]().sharding_spec()


def test_a_model_without_a_spec_is_shown_what_to_write() -> None:
    message = told(Bare())
    assert message.startswith(
        "parallel.tp 2 asked; Bare does not say how it may be split; set parallel.tp: 1, or define"
    )
    spec = pasted(message)
    assert spec.units == ("layers.*",)
    assert dict(spec.tensor_parallel) == {
        "": "replicated",
        "embed": "vocab_embedding",
        "places": "replicated",
        "layers.*.0": "replicated",
        "layers.*.1": "replicated",
        "head": "vocab_head",
    }
    assert '"layers.*.1": "replicated",  # column where it begins a region' in message


def as_shown(ctx: Rank) -> None:
    model = Bare()
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    loss, gradients = plain_gradients(model, batch())
    with started(ctx, "as shown", tp=2) as execution:
        realised(execution, model, spec=pasted(told(Bare())))
        assert backward(execution, model, batch(), {}) == pytest.approx(loss, rel=1e-6)
        check_gradients("as shown", model, gradients)
        assert isinstance(model.get_parameter("head.weight"), DTensor)


def _changed(change: Callable[[Net], Any]) -> Net:
    model = Net(Sizes(), gated=False)
    change(model)
    return model


def _ffn(model: nn.Module) -> nn.Sequential:
    found = model.get_submodule("blocks.0.ffn")
    assert isinstance(found, nn.Sequential)
    return found


def _styled(**styles: str) -> Net:
    """The model with other styles; "-" leaves one out."""
    model = Net(Sizes(), gated=False)
    spec = model.sharding_spec()
    changed = {k: v for k, v in {**spec.tensor_parallel, **styles}.items() if v != "-"}
    model.sharding_spec = lambda: ShardingSpec(spec.units, changed)  # type: ignore[method-assign]
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], list[str]]] = {
    "column": (
        lambda: Net(Sizes(ffn=9)),
        {},
        ["blocks.0.ffn.0.weight (9, 10) is split along dimension 0", "9 is not a multiple of 2", "set parallel.tp"],
    ),
    "vocabulary": (
        lambda: _changed(lambda m: setattr(m, "embed", nn.Embedding(13, 10))),
        {},
        ["embed.weight (13, 10)", "13 is not a multiple of 2"],
    ),
    "no style": (
        lambda: _styled(norm="-"),
        {},
        ['gives no style to module "norm" (LayerNorm), which holds weight, bias'],
    ),
    "no style, root": (
        lambda: _changed(lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(2)))),
        {},
        ['the model itself (Net; its name is ""), which holds extra'],
    ),
    "replicated": (
        lambda: Net(Sizes()),
        {"sequence_parallel": True},
        ['module "" has the style replicated, for whole activations', '"hidden" if it works on each token'],
    ),
    "no head": (
        lambda: _styled(head="row"),
        {"sequence_parallel": True},
        ["no vocab_head, so nothing would gather the sequence again"],
    ),
    "tied": (
        lambda: _changed(lambda m: setattr(_ffn(m)[2], "weight", _ffn(m)[0].weight)),
        {},
        ["are one parameter, and the sharding spec splits them differently"],
    ),
    "max_norm": (
        lambda: _changed(lambda m: setattr(m.embed, "max_norm", 1.0)),
        {},
        ["has max_norm", "remove max_norm"],
    ),
    "frequencies": (
        lambda: _changed(lambda m: setattr(m.embed, "scale_grad_by_freq", True)),
        {},
        ["has scale_grad_by_freq", "remove scale_grad_by_freq"],
    ),
    "not a projection": (
        lambda: _styled(norm="column"),
        {},
        ["which splits a weight of two dimensions, and it has none"],
    ),
    "a parameter beside": (
        lambda: _changed(lambda m: m.head.register_parameter("extra", nn.Parameter(torch.ones(3)))),
        {},
        ["head.extra (3,) is split along dimension 0", "3 is not a multiple of 2", "or give the module another style"],
    ),
    "torch's dropout": (
        lambda: _changed(lambda m: _ffn(m).append(nn.Dropout(0.1))),
        {},
        ['module "blocks.0.ffn.3" (Dropout) draws from each device\'s own', "use accelbridge.models.Dropout"],
    ),
    "dropout anywhere": (
        lambda: _changed(lambda m: _ffn(m).insert(1, Dropout(0.1))),
        {},
        ['module "blocks.0.ffn.1" (Dropout) has no style', '"hidden" on the residual stream'],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_refused(case: str) -> None:
    make, layout, parts = REFUSED[case]
    message = told(make(), **layout)
    assert message.startswith("parallel.")
    for part in parts:
        assert part in message


def test_a_decoder_of_ones_own_is_split_between_heads() -> None:
    config = ModelConfig(vocab_size=VOCABULARY, dim=8, layers=1, heads=2, head_dim=6)
    assert "model.heads 2, which is not a multiple of 4" in told(Decoder(config), tp=4)


def test_an_unknown_style_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match='is "colwise"; styles are enter, column, row'):
        ShardingSpec((), {"layers.*": "colwise"})


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("sections", "parts"),
    [
        ({"parallel": {"tp": 8}}, ["parallel.tp 8 asked", "the run has 4 devices"]),
        ({"parallel": {"tp": 2}, "model": {"kv_heads": 1}}, ["parallel.tp 2 asked", "model.kv_heads 1", "one of 1"]),
        ({"parallel": {"tp": 2}, "model": {"heads": 3, "kv_heads": 3, "dim": 18}}, ["model.heads 3", "one of 1, 3"]),
        ({"parallel": {"tp": 2}, "model": {"vocab_size": 13}}, ["model.vocab_size 13", "set model.vocab_size: 14"]),
        (
            {"parallel": {"tp": 2, "sequence_parallel": True}, "train": {"seq_len": 7}},
            ["train.seq_len 7", "set train.seq_len: 8"],
        ),
        (
            {"parallel": {"tp": 2}, "model": {"dim": 9, "heads": 2, "kv_heads": 2, "head_dim": 2, "ffn_dim": 6}},
            ["parallel.dp_shard 2 asked", "layers.0.ffn.gate.weight (6, 9)", "no dimension of a part (3, 9)"],
        ),
        ({"parallel": {"sequence_parallel": True}}, ["parallel.sequence_parallel asked", "parallel.tp is 1"]),
    ],
)
def test_a_recipe_that_tp_cannot_split_starts_nothing(
    sections: dict[str, Any], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    settings = recipe(tmp_path / "out", **{**sections, "model": {**DECODER, **sections.get("model", {})}})
    with pytest.raises(ConfigError) as error:
        Trainer(settings, data=Samples())
    for part in parts:
        assert part in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("alone")
def test_a_module_that_shards_cannot_share_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias has no other dimension along which data parallel could split what tp leaves of it."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    settings = recipe(tmp_path / "out", parallel={"tp": 2})
    with pytest.raises(
        ConfigError, match=r"dp_shard 2 asked; blocks\.0\.ffn\.0\.bias \(6,\) is split over tp 2 .* \(3,\)"
    ):
        Trainer(settings, model=Net(Sizes(ffn=6)), data=Samples())
    with pytest.raises(ConfigError, match="Bare does not say how it may be split"):
        Trainer(settings, model=Bare(), data=Samples())
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------- Hugging Face, before the run


@pytest.mark.parametrize(
    ("kind", "changes", "parts"),
    [
        ("phi3", {}, ['gives "colwise_gather_output" to model.layers.*.self_attn.qkv_proj', "set parallel.tp: 1"]),
        ("mixtral", {}, ['gives "packed_colwise" to model.layers.*.mlp.experts.gate_up_proj']),
        ("gpt2", {}, ["GPT2LMHeadModel does not say how it may be split"]),
        ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}, ["splits num_attention_heads 1"]),
        ("llama", {"num_key_value_heads": 1}, ["splits num_key_value_heads 1 of LlamaForCausalLM"]),
        ("llama", {"vocab_size": 13}, ["model.embed_tokens.weight (13, 16)", "13 is not a multiple of 2"]),
        (
            "phi",
            {"qk_layernorm": True},
            ['says nothing of "model.layers.0.self_attn.q_layernorm"', '"heads" if it works'],
        ),
        ("phi", {"resid_pdrop": 0.1}, ["draws from each device's own generator"]),
    ],
)
def test_a_plan_without_a_counterpart_is_refused(kind: str, changes: dict[str, Any], parts: list[str]) -> None:
    pytest.importorskip("transformers")
    message = told(hugging_face(kind, **changes))
    for part in parts:
        assert part in message


@pytest.mark.parametrize("kind", SPLIT)
def test_sequence_parallelism_of_a_plan_is_refused(kind: str) -> None:
    pytest.importorskip("transformers")
    assert "has the style replicated, for whole activations" in told(hugging_face(kind), sequence_parallel=True)


def test_gather_split_leaves_alone_what_is_not_split() -> None:
    class Opaque:
        pass

    opaque = Opaque()
    output = (Scores(torch.ones(2), steps=3), [opaque, None], {"x": torch.zeros(1)})
    found: Any = gather_split(nn.Identity(), (), output)
    assert found[0].steps == 3
    assert found[0].scores is output[0].scores
    assert found[1][0] is opaque
