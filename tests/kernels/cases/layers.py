"""rms_norm, rope, swiglu and the losses, as training in bfloat16 calls them; the ends and the middle of what a tile is
for."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kernels.aot import Case

MODULE = "accelbridge.kernels"


def cases(target: str) -> Iterator[Case]:
    yield from _norms()
    yield from _losses()
    turned = {"x": "*bf16", "cos": "*fp32", "sin": "*fp32", "y": "*bf16", "sequence": "i32:16", "heads": "i32",
              "pairs": "i32:16", "batch_stride": "i32:16", "sequence_stride": "i32:16", "head_stride": "i32:16",
              "angle_stride": "i32:16"}  # fmt: skip
    for block in (32, 64, 128):
        for inverse in (False, True):
            label = "backward" if inverse else "forward"
            yield Case(f"rope.{block}", f"{MODULE}.rope:rope_kernel", turned, {"INVERSE": inverse}, label)
    for way, tensors in (("forward", "gate up y"), ("backward", "grad gate up dgate dup")):
        types = {**dict.fromkeys(tensors.split(), "*bf16"), "elements": "i32:16"}
        yield Case(f"swiglu_{way}", f"{MODULE}.swiglu:swiglu_{way}", types)


def _norms() -> Iterator[Case]:
    numbers = {"rstd": "*fp32", "rows": "i32:16", "columns": "i32:16", "stride": "i32:16"}
    forward = {**dict.fromkeys(("x", "weight", "y"), "*bf16"), **numbers, "eps": "fp32"}
    tensors = dict.fromkeys(("grad", "x", "weight", "dx"), "*bf16")
    backward = {**tensors, "partial": "*fp32", **numbers, "grad_stride": "i32:16"}
    for block in (128, 1024, 4096, 8192, 16384):
        yield Case(f"rms_norm_forward.{block}", f"{MODULE}.rms_norm:rms_norm_forward", forward)
        largest = block == 16384  # it has the most registers
        yield Case(f"rms_norm_backward.{block}", f"{MODULE}.rms_norm:rms_norm_backward", backward, sampled=largest)


def _losses() -> Iterator[Case]:
    common = {"logits": "*bf16", "targets": "*i64", "columns": "i32:16", "stride": "i32:16", "first": "i32"}
    odd = {"columns": "i32", "stride": "i32"}
    parts = {**common, **dict.fromkeys(("peak", "total", "picked"), "*fp32")}
    gradient = {**common, **dict.fromkeys(("lse", "factor"), "*fp32"), "out": "*bf16"}
    kernels = ("softmax_parts", parts), ("softmax_gradient", gradient)
    for name, types in kernels:
        yield Case(name, f"{MODULE}.cross_entropy:{name}_kernel", types, sampled=True)
        yield Case(name, f"{MODULE}.cross_entropy:{name}_kernel", types | odd, label="odd vocabulary")
