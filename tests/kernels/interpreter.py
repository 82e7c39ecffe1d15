"""Triton's CPU interpreter (3.7), mended where it is silently wrong, and made as strict as the strictest chip.

Mended: arithmetic, products, sums and casts of bfloat16 and of 8-bit floats, which the interpreter does on their bits;
rounding, which it does towards zero; the fnuz formats and ``dot_scaled``, which it lacks; minima and maxima with NaN,
which on a chip is the other operand.

Made strict, so that a kernel that is right here by chance is seen: an access outside of the tensors that were handed
over raises, where a chip reads another tensor; a cast to 8 bits of what is too large gives NaN, as it does on some
chips and saturates on others; a product of float32 that doesn't ask for "ieee" rounds its operands to tf32.

``install`` changes triton for the whole process, which then cannot compile any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Array = Any
"""A numpy array: of bfloat16 and 8-bit floats the interpreter holds the bits, as uint16 and uint8."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Extents:
    """Addresses that the kernel that runs may touch."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []

    def clear(self) -> None:
        self._spans.clear()

    def add(self, x: torch.Tensor) -> None:
        if x.numel():
            last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            self._spans.append((x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()))

    def check(self, addresses: Array, mask: Array, size: int) -> None:
        """Raise IndexError for an element of ``size`` bytes outside of them."""
        wanted = np.broadcast_to(addresses, np.shape(mask))[mask] if np.ndim(mask) else addresses
        inside = np.zeros(wanted.shape, dtype=bool)
        for start, end in self._spans:
            inside |= (wanted >= start) & (wanted + np.uint64(size) <= end)
        if not inside.all():
            raise IndexError(f"{int((~inside).sum())} of {wanted.size} elements lie outside of the kernel's tensors")


EXTENTS = _Extents()


def install() -> None:
    """Mend the interpreter of this process. Does nothing the second time."""
    import triton.language as tl
    import triton.runtime.interpreter as real

    if getattr(real, "_mended", False):
        return
    real._mended = True  # pyright: ignore[reportAttributeAccessIssue]
    names = {
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float32: torch.float32,
        tl.float64: torch.float64,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e5: torch.float8_e5m2,
        tl.float8e4b8: torch.float8_e4m3fnuz,
        tl.float8e5b16: torch.float8_e5m2fnuz,
    }
    narrow = {tl.bfloat16, tl.float8e4nv, tl.float8e5, tl.float8e4b8, tl.float8e5b16}
    _mend_casts(real, tl, names)
    _mend_arithmetic(real, tl, narrow)
    _mend_products(real, tl, narrow)
    _mend_types(real)
    _guard_memory(real)
    _patch_once(real)
    # Otherwise a third of the time goes into looking for overflows of int32, of which a chip says nothing either.
    real.interpreter_builder.options = real.InterpreterOptions(sanitize_overflow=False)


# -------------------------------------------------------------------------------------------------------- numbers


def _mend_casts(real: Any, tl: Any, names: dict[Any, torch.dtype]) -> None:
    stock_convert, stock_cast = real._convert_float, real.InterpreterBuilder.cast_impl

    def convert(data: Array, source: Any, target: Any, rounding: Any) -> Array:
        if source not in names or target not in names:
            return stock_convert(data, source, target, rounding)
        return _bits(rounded(_tensor(data, names[source]), names[target])).reshape(np.shape(data))

    def cast(self: Any, source: Any, target: Any) -> Any:
        kind = target.scalar
        if kind == tl.bfloat16 and source.dtype.scalar != tl.float32:
            return real.TensorHandle(convert(source.data.astype(np.float32), tl.float32, kind, None), kind)
        return stock_cast(self, source, target)

    real._convert_float = convert
    real.InterpreterBuilder.cast_impl = cast


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` in ``dtype``, to nearest with ties to even. Above the largest number of 8 bits: NaN."""
    y = x.to(dtype)
    if dtype.itemsize > 1:
        return y
    wide = x.to(torch.float32)
    nan = torch.tensor([float("nan")]).to(dtype).view(torch.uint8)
    too_large = wide.abs() > torch.finfo(dtype).max
    return torch.where(too_large, nan, y.view(torch.uint8)).view(dtype)


def _tensor(data: Array, dtype: torch.dtype) -> torch.Tensor:
    bits = np.array(data, order="C").view(f"int{8 * dtype.itemsize}" if dtype.itemsize > 1 else "uint8")
    return torch.from_numpy(bits).view(dtype)


def _bits(x: torch.Tensor) -> Array:
    size = x.element_size()
    kinds = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}
    return x.contiguous().view(_INTEGERS[size]).numpy().view(kinds.get(x.dtype, f"uint{8 * size}"))


def _widener(real: Any, tl: Any, narrow: set[Any]) -> Callable[[Any], Array]:
    def wide(handle: Any) -> Array:
        kind = handle.dtype.scalar
        return real._convert_float(handle.data, kind, tl.float32, None) if kind in narrow else handle.data

    return wide


def _mend_arithmetic(real: Any, tl: Any, narrow: set[Any]) -> None:
    builder, wide = real.InterpreterBuilder, _widener(real, tl, narrow)
    bitwise = {np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift}
    stock_binary = builder.binary_op

    def back(x: Array, kind: Any) -> Any:
        """A handle of float32 numbers ``x`` in ``kind``."""
        data = real._convert_float(np.asarray(x, dtype=np.float32), tl.float32, kind, None)
        return real.TensorHandle(data, kind)

    def binary(self: Any, left: Any, right: Any, op: Any) -> Any:
        kind = None if isinstance(left.dtype, tl.pointer_type) else left.dtype.scalar
        if kind not in narrow or op in bitwise:
            return stock_binary(self, left, right, op)
        found = op(wide(left), wide(right))
        return real.TensorHandle(found, kind) if found.dtype == np.bool_ else back(found, kind)

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate: Any) -> Any:
        least, most = (np.maximum, np.minimum) if propagate == tl.PropagateNan.ALL else (np.fmax, np.fmin)
        return binary(self, binary(self, x, low, least), high, most)

    def total(self: Any, x: Any) -> Any:
        found = np.sum(wide(x.handle), axis=self.axis, keepdims=self.keep_dims)
        if x.dtype not in narrow:
            return self.to_tensor(found, x.dtype)
        data = real._convert_float(np.atleast_1d(found).astype(np.float32), tl.float32, x.dtype, None)
        return self.to_tensor(data if np.ndim(found) else data[0], x.dtype)

    builder.binary_op = binary
    builder.create_minnumf = lambda self, a, b: binary(self, a, b, np.fmin)
    builder.create_maxnumf = lambda self, a, b: binary(self, a, b, np.fmax)
    builder.create_clampf = clamp
    real.ReduceOps.sum = total


def _mend_products(real: Any, tl: Any, narrow: set[Any]) -> None:
    wide = _widener(real, tl, narrow)
    ieee = real._ir.INPUT_PRECISION.IEEE

    def operand(handle: Any, precision: Any) -> Array:
        data = wide(handle)
        return as_tf32(data) if handle.dtype.scalar == tl.float32 and precision != ieee else data

    def dot(self: Any, a: Any, b: Any, c: Any, precision: Any, _imprecise: Any) -> Any:
        product = np.matmul(operand(a, precision), operand(b, precision), dtype=c.data.dtype)
        return real.TensorHandle(product + c.data, c.dtype.scalar)

    def scaled(handle: Any, scale: Any) -> Array:
        """Rows of K by the scales of their blocks, powers of two by their e8m0 codes."""
        values = wide(handle)
        if scale is None:
            return values
        powers = np.where(scale.data == 255, np.nan, np.exp2(scale.data.astype(np.float32) - 127))
        return values * np.repeat(powers.astype(np.float32), values.shape[-1] // powers.shape[-1], axis=-1)

    def dot_scaled(self: Any, a: Any, a_scale: Any, _a: Any, b: Any, b_scale: Any, _b: Any, *rest: Any) -> Any:
        c = rest[-1]
        right = real.TensorHandle(np.swapaxes(b.data, -1, -2), b.dtype)
        product = np.matmul(scaled(a, a_scale), np.swapaxes(scaled(right, b_scale), -1, -2), dtype=np.float32)
        return real.TensorHandle(product + c.data, c.dtype.scalar)

    semantic = real.interpreter_semantic
    stock = semantic.dot_scaled
    # Names of formats reach the interpreter as texts, where the compiler gets constants.
    semantic.dot_scaled = lambda *args: stock(*(tl.constexpr(x) if isinstance(x, str) else x for x in args))
    real.InterpreterBuilder.create_dot = dot
    real.InterpreterBuilder.create_dot_scaled = dot_scaled


def as_tf32(x: Array) -> Array:
    """float32 rounded to the 10 bits after the point that tf32 keeps."""
    return ((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


# -------------------------------------------------------------------------------------------------- types and memory


def _mend_types(real: Any) -> None:
    stock = real._patch_lang_core

    def patch(lang: Any, scope: Any) -> None:
        stock(lang, scope)
        inner = lang.dtype.to_ir

        def to_ir(self: Any, builder: Any) -> Any:
            if self.name in ("fp8e4b8", "fp8e5b16"):
                return getattr(builder, f"get_{self.name}_ty")()
            return inner(self, builder)

        scope.set_attr(lang.dtype, "to_ir", to_ir)

    real._patch_lang_core = patch


def _guard_memory(real: Any) -> None:
    builder, executor = real.InterpreterBuilder, real.GridExecutor
    stock_convert, stock_call = real._implicit_cvt, executor.__call__

    def convert(arg: Any) -> Any:
        if hasattr(arg, "data_ptr"):
            EXTENTS.add(real._unwrap_tensor(arg))
        return stock_convert(arg)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        EXTENTS.clear()
        return stock_call(self, *args, **kwargs)

    def guarded(name: str, mask_at: int) -> None:
        stock = getattr(builder, name)

        def access(self: Any, *args: Any, **kwargs: Any) -> Any:
            pointers = next(each for each in args if isinstance(getattr(each, "dtype", None), real.tl.pointer_type))
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            EXTENTS.check(pointers.data, args[mask_at].data, size)
            return stock(self, *args, **kwargs)

        setattr(builder, name, access)

    real._implicit_cvt = convert
    executor.__call__ = call
    guarded("create_masked_load", 1)
    guarded("create_masked_store", 2)
    guarded("create_atomic_rmw", 3)


def _patch_once(real: Any) -> None:
    """The interpreter patches all of triton.language at every call of a function of the device, which takes more time
    than the call: once for each of its modules in a launch will do."""
    stock_run, stock_patch = real.GridExecutor.__call__, real._patch_lang
    patched: set[int] = set()

    def modules(fn: Any) -> set[int]:
        return {id(each) for each in fn.__globals__.values() if each is real.tl or each is real.tl.core}

    def patch(fn: Any) -> Any:
        patched.update(modules(fn))
        return stock_patch(fn)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return stock_run(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not modules(self.fn) <= patched:
            patch(self.fn)
        return self.rewrite()(*args, **kwargs)

    real._patch_lang = patch
    real.GridExecutor.__call__ = run
    real.InterpretedFunction.__call__ = call
