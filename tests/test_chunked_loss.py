"""The loss that takes the output projection with it: logits never exist whole, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from accelbridge import ops
from accelbridge.errors import ConfigError
from accelbridge.models.requests import loss_request
from accelbridge.ops import chunked_losses
from accelbridge.train.loss import NextTokenLoss
from tests import cli
from tests.ranks import Rank, run_ranks
from tests.scenes import TP, TWO, Sections, Steps, train_all

N, M, V = 12, 6, 16


@pytest.fixture(autouse=True)
def five_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_losses, "COLUMNS", 5)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and targets, a fifth of which is ignored; the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((N, M), (V, M)))
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::5] = -100
    return x.to(dtype), weight.to(dtype), targets


def exact(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in float64, by torch alone."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    loss = F.cross_entropy(x @ weight.T, targets, reduction="sum")
    return loss.detach(), *torch.autograd.grad(3 * loss, (x, weight))


def off(found: Tensor, right: Tensor) -> float:
    return float((found.detach().double() - right).norm() / right.norm())


@pytest.mark.parametrize("ignored", [-100, 3])
def test_its_gradient_is_right(ignored: int) -> None:
    x, weight, targets = inputs()
    call = lambda x, weight: ops.linear_cross_entropy(x, weight, targets.where(targets >= 0, ignored), ignored)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("columns", [1, 5, 16, 99])
def test_it_is_the_loss_of_the_logits(
    monkeypatch: pytest.MonkeyPatch, columns: int, dtype: torch.dtype, bound: float
) -> None:
    monkeypatch.setattr(chunked_losses, "COLUMNS", columns)
    x, weight, targets = inputs(dtype)
    wanted = exact(x, weight, targets)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    loss = ops.linear_cross_entropy(x, weight, targets)
    found = (loss, *torch.autograd.grad(3 * loss, (x, weight)))
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert [t.dtype for t in found[1:]] == [dtype, dtype]
    for ours, right in zip(found, wanted, strict=True):
        assert off(ours, right) <= bound


def test_what_is_frozen_gets_no_gradient() -> None:
    x, weight, targets = inputs()
    ops.linear_cross_entropy(x, weight.requires_grad_(), targets).backward()
    ops.linear_cross_entropy(x.requires_grad_(), weight.detach(), targets).backward()
    assert off(3 * weight.grad, exact(x, weight, targets)[2]) <= 1e-14  # pyright: ignore[reportOperatorIssue]
    assert off(3 * x.grad, exact(x, weight, targets)[1]) <= 1e-14  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize("target", [-1, V])
def test_a_target_outside_of_the_vocabulary_gives_nan(target: int) -> None:
    x, weight, targets = inputs()
    targets[1] = target
    assert ops.linear_cross_entropy(x, weight, targets).isnan()


class Largest(TorchDispatchMode):
    """The most elements that a tensor has which an op makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


def test_logits_never_exist_whole() -> None:
    x, weight = torch.randn(400, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
    targets = torch.randint(0, 100, (400,))
    largest = {}
    for name in ("chunked", "whole"):
        with Largest() as seen:
            if name == "chunked":
                loss = ops.linear_cross_entropy(x, weight, targets)
            else:
                loss = ops.cross_entropy(ops.linear(x, weight), targets)
            loss.backward()
        largest[name] = seen.elements
    assert largest == {"chunked": 400 * 8, "whole": 400 * 100}


@pytest.mark.parametrize(
    ("x", "weight", "targets", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(4, 5), torch.zeros(2), r"\(2, 3\).*\(4, 5\)"),
        (torch.zeros(1, 2, 3), torch.zeros(4, 3), torch.zeros(2), r"\(1, 2, 3\)"),
        (torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(3), r"\(2, 3\).*\(3,\)"),
        (torch.zeros(2, 3), torch.zeros(4, 3).bfloat16(), torch.zeros(2), "float32.*bfloat16"),
    ],
)
def test_what_does_not_fit_raises(x: Tensor, weight: Tensor, targets: Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ops.linear_cross_entropy(x, weight, targets)


@pytest.mark.parametrize("tokens", [0, 4])
def test_no_tokens_that_count(tokens: int) -> None:
    x, weight = torch.randn(tokens, M, requires_grad=True), torch.randn(V, M, requires_grad=True)
    loss = ops.linear_cross_entropy(x, weight, torch.full((tokens,), -100))
    loss.backward()
    assert loss.item() == 0
    for leaf in (x, weight):
        assert leaf.grad is not None
        assert not leaf.grad.any()


# ------------------------------------------------------------------------------------------- a vocabulary of ranks


def of_a_part(ctx: Rank) -> list[float]:
    """How far loss and gradients of this rank are off; the gradient of x once it was summed."""
    chunked_losses.COLUMNS = 5
    dist.init_process_group("gloo", store=ctx.store(), rank=ctx.rank, world_size=ctx.size)
    group = dist.group.WORLD
    assert group is not None
    x, weight, targets = inputs()
    wanted = exact(x, weight, targets)
    rows = V // ctx.size
    mine = weight[ctx.rank * rows :][:rows].clone().requires_grad_()
    loss = ops.vocab_parallel_linear_cross_entropy(x.requires_grad_(), mine, targets, group)
    dx, dw = torch.autograd.grad(3 * loss, (x, mine))
    dist.all_reduce(dx)
    unknown = ops.vocab_parallel_linear_cross_entropy(x, mine, torch.full((N,), V), group)
    assert unknown.isnan()
    assert not ops.vocab_parallel_linear_cross_entropy(x, mine, torch.full((N,), V - 1), group).isnan()
    part = wanted[2][ctx.rank * rows :][:rows]
    return [off(loss, wanted[0]), off(dx, wanted[1]), off(dw, part)]


def test_a_vocabulary_split_over_ranks() -> None:
    for found in run_ranks(of_a_part, 2):
        assert max(found) <= 1e-14, found


# ---------------------------------------------------------------------------------------------------- the trainer

CHUNKED = {"memory": {"chunked_loss": True}}
SEQUENCE = TWO["tp 2, sequence parallel"]
RUNS: dict[str, Sections] = {
    "whole": TP,
    "chunked, sequence": {**SEQUENCE, **CHUNKED},
    "chunked, tied": {**SEQUENCE, "model": {**TP["model"], "tie_embeddings": True}, **CHUNKED},
    "whole, tied": {**TP, "model": {**TP["model"], "tie_embeddings": True}},
    "chunked, sharded": {"model": TP["model"], **CHUNKED},
}
STEPS = {"train": {"steps": 4}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, store: Path) -> dict[str, Steps]:
    folder = tmp_path_factory.mktemp("chunked")
    run_ranks(train_all, 2, folder, store, RUNS, STEPS, timeout=240)
    return {name: cli.steps_of(folder / name) for name in RUNS}


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("chunked")])
def test_a_run_is_what_it_would_be_with_logits(runs: dict[str, Steps], name: str) -> None:
    usual = runs["whole, tied" if "tied" in name else "whole"]
    for step, line in runs[name].items():
        for value in ("loss", "grad_norm"):
            assert line[value] == pytest.approx(usual[step][value], rel=1e-5), f"step {step} {value}"


def test_requests() -> None:
    names = {loss_request("float32", *case).op for case in ((False, False), (False, True), (True, False), (True, True))}
    assert names < set(ops.NAMES)
    assert loss_request("float32", split=True, chunked=True).op == "vocab_parallel_linear_cross_entropy"


def test_a_model_that_takes_no_targets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"memory\.chunked_loss asked; the forward of Linear takes no targets"):
        NextTokenLoss(nn.Linear(2, 2), chunked=True)
