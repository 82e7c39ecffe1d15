"""Kernels of layers and losses with one defect each: the checks must see it by what they compare, not by a crash."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import torch

from accelbridge.kernels import cross_entropy, rms_norm, rope, swiglu, tiles
from tests.kernels import layer_checks as check
from tests.kernels.mutants import sampled

F32, BF16 = torch.float32, torch.bfloat16
_NUMBER = count()


@dataclass(frozen=True)
class Mutant:
    """A module's source with ``before`` replaced, and the check that must see it."""

    name: str
    module: ModuleType
    before: str
    after: str
    sees: Callable[[ModuleType], None]

    def load(self, folder: Path) -> ModuleType:
        """The altered module, with custom ops of its own."""
        assert self.module.__file__ is not None
        source = Path(self.module.__file__).read_text(encoding="utf-8")
        assert source.count(self.before) == 1, f"{self.name}: its place is there {source.count(self.before)} times"
        own = f"accelbridge_mutant{next(_NUMBER)}"
        source = source.replace(self.before, self.after)
        source = source.replace('"accelbridge::', f'"{own}::').replace("torch.ops.accelbridge", f"torch.ops.{own}")
        path = folder / f"{own}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(own, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


_norm = partial(check.rms_norm, dtype=F32, kind="normal", rows=29, columns=300)
_small_norm = partial(check.rms_norm, dtype=F32, kind="normal", rows=5, columns=128, eps=0.5)
_loss = partial(check.cross_entropy, dtype=F32, kind="normal", rows=7, columns=257)
_peaked = partial(check.cross_entropy, dtype=F32, kind="normal", rows=7, columns=257, magnitude=100.0)
_turn = partial(check.rope, dtype=F32, shape=(2, 5, 3, 40))
_turn_by_row = partial(check.rope, dtype=F32, shape=(3, 5, 2, 8), by_row=True)
_gated = partial(check.swiglu, dtype=F32, kind="normal", shape=(3, 50))

MUTANTS = [
    Mutant("eps outside of the root", rms_norm,
           "tl.rsqrt(tl.sum(wide * wide, 1) / columns + eps)",
           "tl.rsqrt(tl.sum(wide * wide, 1) / columns) + eps", _small_norm),
    Mutant("the mean over a whole block", rms_norm,
           "tl.sum(wide * wide, 1) / columns + eps", "tl.sum(wide * wide, 1) / BLOCK + eps", _norm),
    Mutant("the weight forgotten in the gradient of x", rms_norm,
           "weighted = given * w[None, :]", "weighted = given", _norm),
    Mutant("no mean in the gradient of x", rms_norm,
           "(weighted - normal * mean[:, None]) * scale", "weighted * scale", _norm),
    Mutant("the scale dropped from the gradient of x", rms_norm,
           "(weighted - normal * mean[:, None]) * scale", "weighted - normal * mean[:, None]", _norm),
    Mutant("the gradient of the weight of x itself", rms_norm,
           "total += tl.sum(given * normal, 0)", "total += tl.sum(given * wide, 0)", _norm),
    Mutant("the last step of rows missing", rms_norm,
           "range(program, tl.cdiv(rows, ROWS), PROGRAMS)", "range(program, rows // ROWS, PROGRAMS)", _norm),
    Mutant("partial sums overwritten", rms_norm,
           "total += tl.sum(given * normal, 0)", "total = tl.sum(given * normal, 0)", _norm),
    Mutant("a result rounded twice", rms_norm,
           "out = wide * scale[:, None] * w[None, :]",
           "out = (wide * scale[:, None]).to(y.dtype.element_ty).to(tl.float32) * w[None, :]",
           partial(check.rms_norm, dtype=BF16, kind="normal", rows=29, columns=300)),
    Mutant("the last tile of the vocabulary missing", cross_entropy,
           "for start in range(0, columns, BLOCK):", "for start in range(0, columns - BLOCK + 1, BLOCK):", _loss),
    Mutant("what is masked counted as logits of 0", cross_entropy,
           'mask=column < columns, other=float("-inf")).to(tl.float32)\n        higher',
           "mask=column < columns, other=0.0).to(tl.float32)\n        higher", _loss),
    Mutant("sums not rescaled when a larger logit comes", cross_entropy,
           "added * tl.exp(largest - base)", "added", _loss),
    Mutant("no maximum subtracted", cross_entropy,
           'base = tl.where(higher == float("-inf"), 0.0, higher)', "base = 0.0", _peaked),
    Mutant("-inf minus -inf", cross_entropy,
           'base = tl.where(higher == float("-inf"), 0.0, higher)', "base = higher", check.cross_entropy_of_infinities),
    Mutant("the scale of the gradient dropped", cross_entropy,
           "tl.where(hit, 1.0, 0.0)) * scale", "tl.where(hit, 1.0, 0.0))", _loss),
    Mutant("the scale of the target's gradient dropped", cross_entropy,
           "(tl.exp(x - tl.load(lse + row)) - tl.where(hit, 1.0, 0.0)) * scale",
           "tl.exp(x - tl.load(lse + row)) * scale - tl.where(hit, 1.0, 0.0)", _loss),
    Mutant("the target one column to the right", cross_entropy,
           "hit = column == tl.load(targets + row) - first",
           "hit = column == tl.load(targets + row) - first + 1", _loss),
    Mutant("gradients of ignored tokens", cross_entropy,
           "factor = torch.where(targets != ignore_index, grad, 0.0)\n    return",
           "factor = torch.where(targets == targets, grad, 0.0)\n    return", _loss),
    Mutant("ignored tokens counted", cross_entropy,
           "counted_sum(lse - picked, targets, logits.shape[1], ignore_index), lse",
           "counted_sum(lse - picked, targets.clamp_min(0), logits.shape[1], ignore_index), lse", _loss),
    Mutant("the gradient of the last columns missing", cross_entropy,
           "(rows, triton.cdiv(columns, launch[\"BLOCK\"]))", "(rows, columns // launch[\"BLOCK\"])", _loss),
    Mutant("the gradient in place of the caller's logits", cross_entropy,
           "factor.contiguous(), out, columns", "factor.contiguous(), logits, columns", _loss),
    Mutant("backward the same turn as forward", rope, "not ctx.inverse", "ctx.inverse", _turn),
    Mutant("the sign of a sine", rope, "(second * c + first * s)", "(second * c - first * s)", _turn),
    Mutant("neighbours paired", rope,
           "second = tl.load(source + pairs,", "second = tl.load(source + (pairs if pairs < 20 else 1),", _turn),
    Mutant("the last heads missing", rope,
           "triton.cdiv(heads, launch[\"HEADS\"])", "heads // launch[\"HEADS\"]", _turn),
    Mutant("one row's angles for all", rope,
           "cos.stride(0) if cos.dim() == 3 else 0", "0", _turn_by_row),
    Mutant("the sigmoid's own derivative forgotten", swiglu,
           "d * u * s * (1.0 + g * (1.0 - s))", "d * u * s", _gated),
    Mutant("gate and up exchanged backward", swiglu,
           "(d * g * s).to(dup.dtype.element_ty)", "(d * u * s).to(dup.dtype.element_ty)", _gated),
    Mutant("the sign in the sigmoid", swiglu,
           "(g / (1.0 + tl.exp(-g)) * u)", "(g / (1.0 + tl.exp(g)) * u)", _gated),
    Mutant("the last tile of elements missing", swiglu,
           "(triton.cdiv(elements, launch[\"BLOCK\"]),)", "(elements // launch[\"BLOCK\"],)", _gated),
]  # fmt: skip


@pytest.mark.parametrize("mutant", sampled(MUTANTS), ids=lambda mutant: mutant.name)
def test_a_defect_is_seen(mutant: Mutant, tmp_path: Path) -> None:
    tiles.bind(check.TILES)
    broken = mutant.load(tmp_path)
    with pytest.raises(AssertionError, match=r"bounds off|gradient of the kernel lies"):
        mutant.sees(broken)


@pytest.mark.parametrize("sees", {mutant.sees: None for mutant in MUTANTS}, ids=range(len({m.sees for m in MUTANTS})))
def test_the_check_passes_without_it(sees: Callable[[ModuleType], None]) -> None:
    tiles.bind(check.TILES)
    sees(next(mutant.module for mutant in MUTANTS if mutant.sees == sees))
