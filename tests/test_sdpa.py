"""Attention by one kernel of torch's scaled_dot_product_attention, on the CPU's: the same code as a device's."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from accelbridge.backend import Mask, Request, unsupported
from accelbridge.errors import Unsupported
from accelbridge.ops.dot_product import attention as reference
from accelbridge.portable.known_bad import KnownBad, at_least, refusal, version_in
from accelbridge.portable.sdpa import Kernel, SdpaAttention, candidate, sdpa, supports

FLOATS = ("float32", "bfloat16")
MATH = Kernel("math", "MATH", ("aten::bmm",), FLOATS, masks=True, grouped=True)
FLASH = Kernel("flash", "FLASH_ATTENTION", ("aten::_scaled_dot_product_flash_attention_for_cpu",), FLOATS,
               masks=True, grouped=True)  # fmt: skip
KERNELS = [
    MATH,
    FLASH,
    replace(FLASH, name="repeats", grouped=False, dense_values=True),
    replace(FLASH, name="maskless", masks=False),
]


def tensors(queries: int, keys: int, heads: int = 4, groups: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """q [2, H, Sq, 16] and k, v [2, G, Sk, 16], as a model hands them over: sequence before heads in memory."""
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = ((2, queries, heads, 16), (2, keys, groups, 16), (2, keys, groups, 16))
    q, k, v = (torch.randn(shape, generator=generator).transpose(1, 2).requires_grad_() for shape in shapes)
    return q, k, v


SEGMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
CASES = [
    ("causal", 12, 12, Mask()),
    ("causal, fewer queries", 5, 12, Mask()),
    ("causal, more queries", 12, 5, Mask()),
    ("window", 12, 12, Mask(window=3)),
    ("window, fewer queries", 5, 12, Mask(window=3)),
    ("window, more queries", 12, 5, Mask(window=3)),
    ("window of all", 12, 12, Mask(window=12)),
    ("full", 7, 12, Mask(causal=False)),
    ("segments", 12, 12, Mask(segments_BS=SEGMENTS)),
    ("segments, not causal", 12, 12, Mask(causal=False, segments_BS=SEGMENTS)),
    ("no queries", 0, 12, Mask()),
]


def needs_mask(mask: Mask, keys: int) -> bool:
    return mask.segments_BS is not None or (mask.window is not None and mask.window < keys)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("scale", [None, 0.7])
def test_outputs_and_gradients_are_the_references(kernel: Kernel, case: tuple, scale: float | None) -> None:
    _, queries, keys, mask = case
    if not kernel.masks and needs_mask(mask, keys):
        with pytest.raises(Unsupported, match="takes no mask"):
            sdpa(kernel, *tensors(queries, keys), mask)
        return
    found, wanted = [], []
    for call, results in ((lambda *a: sdpa(kernel, *a, scale=scale), found),
                          (lambda *a: reference(*a, scale=scale), wanted)):  # fmt: skip
        inputs = tensors(queries, keys)
        out = call(*inputs, mask)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        results += [out, *torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)]
    for mine, right in zip(found, wanted, strict=True):
        assert (mine is None) == (right is None)
        if mine is not None:
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)


class Seen(TorchDispatchMode):
    """Names of the ops that run below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dense: dict[str, bool] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        self.names.add(name)
        if "scaled_dot_product" in name:
            self.dense[name] = args[2].is_contiguous()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_it_runs_its_kernel_and_no_other(kernel: Kernel) -> None:
    with torch.no_grad(), Seen() as seen:
        sdpa(kernel, *tensors(12, 12), Mask())
    assert set(kernel.launches) & seen.names
    others = {name for each in KERNELS for name in each.launches if each.launches != kernel.launches}
    assert not others & seen.names


def test_values_are_made_contiguous_where_they_have_to_be() -> None:
    for kernel in KERNELS[1:3]:
        with torch.no_grad(), Seen() as seen:
            sdpa(kernel, *tensors(12, 12, groups=4), Mask())
        assert seen.dense == {kernel.launches[0]: kernel.dense_values}


@pytest.mark.parametrize("asked", [{"softcap": 30.0}, {"return_lse": True}])
def test_what_no_kernel_has_is_refused(asked: dict) -> None:
    with pytest.raises(Unsupported, match="bind the portable reference"):
        sdpa(FLASH, *tensors(4, 4), Mask(), **asked)


SMALL = Kernel("small", "MATH", (), ("bfloat16",), masks=False, grouped=True, max_head_dim=128, head_dim_multiple=8,
               min_keys=2)  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (Request("attention", "bfloat16", {"head_dim": 128, "sequence": 2}, needs=frozenset({"causal", "gqa"})), ""),
        (Request("attention", "float32"), "takes bfloat16, not float32"),
        (Request("attention", "bfloat16", {"head_dim": 136}), "takes heads up to 128, not 136"),
        (Request("attention", "bfloat16", {"head_dim": 100}), "of a multiple of 8, not 100"),
        (Request("attention", "bfloat16", {"sequence": 1}), "sequences from 2 on, not 1"),
        (Request("attention", "bfloat16", needs=frozenset({"causal", "window"})), "takes no mask tensor, and window"),
        (Request("attention", "bfloat16", needs=frozenset({"segments"})), "takes no mask tensor, and segments"),
        (Request("attention", "bfloat16", needs=frozenset({"softcap"})), "cannot cap scores"),
        (Request("attention", "bfloat16", needs=frozenset({"lse"})), "logarithm of the softmax sum"),
        (Request("attention", "bfloat16", needs=frozenset({"sinks"})), 'knows no "sinks"'),
    ],
)
def test_what_a_kernel_serves(request_: Request, why: str) -> None:
    found = supports(SMALL, request_)
    assert bool(found) is (why == "")
    assert why in found.reason


def test_a_backend_may_refuse_more_and_prepare_once() -> None:
    ran: list[str] = []
    refused = candidate(FLASH, lambda request: unsupported("not today"), lambda: ran.append("prepared"))
    assert refused.supports(Request("attention", "float32")).reason == "not today"
    assert ran == []
    kernel = candidate(FLASH, prepare=lambda: ran.append("prepared")).load()
    assert ran == ["prepared"]
    assert kernel(*tensors(4, 4), Mask()).shape == (2, 4, 4, 16)
    assert ran == ["prepared"]


def test_the_interface_takes_the_first_that_serves() -> None:
    attention = SdpaAttention([candidate(replace(MATH, masks=False)), candidate(FLASH)])
    for mask, name in ((Mask(), "aten::bmm"), (Mask(window=3), FLASH.launches[0])):
        with torch.no_grad(), Seen() as seen:
            attention.attention(*tensors(12, 12), mask)
        assert name in seen.names
    out, lse = attention.attention(*tensors(12, 12), Mask(), return_lse=True)
    assert (out.shape, lse.shape) == ((2, 4, 12, 16), (2, 4, 12))
    with pytest.raises(ValueError, match="attention takes q"):
        attention.attention(torch.ones(2), torch.ones(2), torch.ones(2), Mask())


# --------------------------------------------------------------------------------------------------- known bad

RULE = KnownBad(
    issue="someone/library#1",
    reported=date(2026, 1, 2),
    read=date(2026, 2, 3),
    implementations=("flash",),
    architectures=("a1",),
    software={"library": ">=9.19,<9.25.1,!=9.24.1"},
    applies=lambda request: request.shape.get("sequence", 0) % 128 == 64,
    what="wrong",
    lifted="library 9.25.1",
)
ODD = Request("attention", "bfloat16", {"sequence": 192})


@pytest.mark.parametrize(
    ("name", "sequence", "architecture", "version", "refused"),
    [
        ("flash", 192, "a1", "9.20.0.48", True),
        ("flash", 192, "a1", "9.25.0.15", True),
        ("flash", 192, "a1", None, True),
        ("flash", 192, "a1", "unreadable", True),
        ("flash", 192, "a1", "9.25.1.4", False),
        ("flash", 192, "a1", "9.18", False),
        ("flash", 256, "a1", "9.20", False),
        ("flash", 192, "a2", "9.20", False),
        ("other", 192, "a1", "9.20", False),
    ],
)
def test_a_rule_refuses_what_it_names(
    name: str, sequence: int, architecture: str, version: str | None, refused: bool
) -> None:
    request = replace(ODD, shape={"sequence": sequence})
    software = {} if version is None else {"library": version}
    found = refusal([RULE], name, request, architecture, software)
    assert (found is not None) is refused
    if found is not None:
        assert not found
        assert found.reason == "someone/library#1: wrong (reported 2026-01-02; mended in library 9.25.1)"


def test_a_rule_without_a_mend_says_so() -> None:
    assert "no version is known that mends it" in replace(RULE, lifted="").reason


def test_versions_that_are_not_known() -> None:
    assert version_in(None, "<1")
    assert not at_least(None, "1")
    assert at_least("2.13.0+cu130", "2.10")
    assert not at_least("2.9.1", "2.10")
    assert not at_least("unreadable", "1")
