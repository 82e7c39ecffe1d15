"""Attention by torch's ``scaled_dot_product_attention``, restricted to one of its kernels. Which kernels a device has,
and what each takes, is data that its backend gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from accelbridge.backend import FULL, Attention, Implementation, Mask, Request, Support, unsupported
from accelbridge.errors import Unsupported

if TYPE_CHECKING:
    from torch import Tensor

_NEEDS = frozenset({"causal", "window", "segments", "gqa"})
_LACKS = {
    "softcap": "torch's scaled_dot_product_attention cannot cap scores",
    "lse": "torch's scaled_dot_product_attention does not return the logarithm of the softmax sum",
}


@dataclass(frozen=True)
class Kernel:
    """One kernel of ``scaled_dot_product_attention``."""

    name: str
    backend: str
    """Member of ``torch.nn.attention.SDPBackend``."""
    launches: tuple[str, ...]
    dtypes: tuple[str, ...]
    masks: bool
    """Whether it takes a mask tensor, which a window and segments need; causal without either needs none."""
    grouped: bool
    """Whether it reads grouped key/value heads in place; else they are repeated, and their gradients summed."""
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    min_keys: int = 1
    deterministic: bool = True
    dense_values: bool = False
    """Whether values have to be contiguous."""


def supports(kernel: Kernel, request: Request) -> Support:
    """Whether ``kernel`` can serve ``request``, as far as torch's own checks of its arguments go."""
    for need in sorted(request.needs - _NEEDS):
        return unsupported(_LACKS.get(need, f'torch\'s scaled_dot_product_attention knows no "{need}"'))
    if request.dtype not in kernel.dtypes:
        return unsupported(f"takes {', '.join(kernel.dtypes)}, not {request.dtype}")
    if not kernel.masks and request.needs & {"window", "segments"}:
        wanted = " and ".join(sorted(request.needs & {"window", "segments"}))
        return unsupported(f"takes no mask tensor, and {wanted} need one")
    return _sizes(kernel, request)


def _sizes(kernel: Kernel, request: Request) -> Support:
    head_dim, keys = request.shape.get("head_dim"), request.shape.get("sequence")
    if head_dim is not None and kernel.max_head_dim is not None and head_dim > kernel.max_head_dim:
        return unsupported(f"takes heads up to {kernel.max_head_dim}, not {head_dim}")
    if head_dim is not None and head_dim % kernel.head_dim_multiple:
        return unsupported(f"takes heads of a multiple of {kernel.head_dim_multiple}, not {head_dim}")
    if keys is not None and keys < kernel.min_keys:
        return unsupported(f"takes sequences from {kernel.min_keys} on, not {keys}")
    return FULL


def sdpa(
    kernel: Kernel,
    q_BHSD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    mask: Mask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor:
    """The op ``attention`` on ``kernel``, and on no other: torch raises RuntimeError where that refuses the tensors.

    Raises ``Unsupported`` for a softcap, for lse, and for a mask that the kernel does not take.
    """
    from accelbridge.ops.dot_product import attention as reference
    from accelbridge.ops.dot_product import check_attention

    if softcap is not None or return_lse:
        raise Unsupported(f"{_LACKS['lse' if return_lse else 'softcap']}; bind the portable reference instead")
    check_attention(q_BHSD, k_BGSD, v_BGSD, mask, softcap)
    if 0 in q_BHSD.shape or 0 in k_BGSD.shape or v_BGSD.shape[3] == 0:
        return reference(q_BHSD, k_BGSD, v_BGSD, mask, scale=scale)  # no kernel takes what is empty
    queries, keys = q_BHSD.shape[2], k_BGSD.shape[2]
    if mask.causal and queries > keys:
        # The first queries stand before the first key and see nothing: 0.
        seeing = sdpa(kernel, q_BHSD[:, :, queries - keys :], k_BGSD, v_BGSD, mask, scale=scale)
        return _preceded_by_zeros(seeing, queries - keys)
    plain = mask.causal and mask.segments_BS is None and (mask.window is None or mask.window >= keys)
    if plain:
        # torch aligns a causal mask top-left; with as many queries as keys that is bottom-right too.
        square = _preceded_by_zeros(q_BHSD, keys - queries)
        return _call(kernel, square, k_BGSD, v_BGSD, None, True, scale)[:, :, keys - queries :]
    return _call(kernel, q_BHSD, k_BGSD, v_BGSD, _visible(kernel, mask, queries, keys, q_BHSD), False, scale)


def _visible(kernel: Kernel, mask: Mask, queries: int, keys: int, q: Tensor) -> Tensor | None:
    from accelbridge.ops.masks import visible_keys

    visible = visible_keys(mask, queries, keys, q.device)
    if visible is not None and not kernel.masks:
        raise Unsupported(
            f"attention with a window or segments asked of {kernel.name}, which takes no mask; bind another candidate"
        )
    return visible


def _preceded_by_zeros(x: Tensor, rows: int) -> Tensor:
    import torch.nn.functional as F

    return F.pad(x, (0, 0, rows, 0)) if rows else x


def _call(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    grouped = q.shape[1] != k.shape[1]
    if grouped and not kernel.grouped:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    v = v.contiguous() if kernel.dense_values else v
    with sdpa_kernel(getattr(SDPBackend, kernel.backend)):
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=causal, scale=scale, enable_gqa=grouped and kernel.grouped
        )


def candidate(
    kernel: Kernel,
    refuse: Callable[[Request], Support | None] = lambda request: None,
    prepare: Callable[[], object] = lambda: None,
) -> Implementation:
    """``kernel`` as a candidate for the plan. ``refuse``: what its backend has against a request besides; ``prepare``
    runs once, where it is bound."""

    def serves(request: Request) -> Support:
        own = supports(kernel, request)
        against = refuse(request) if own else None
        return own if against is None else against

    def load() -> Callable[..., Any]:
        prepare()
        return partial(sdpa, kernel)

    return Implementation("attention", kernel.name, serves, load, kernel.deterministic, launches=kernel.launches)


class SdpaAttention(Attention):
    """The first of ``candidates`` that serves a call, else the portable reference."""

    def __init__(self, candidates: Sequence[Implementation]) -> None:
        self._candidates = tuple(candidates)

    def implementations(self) -> Sequence[Implementation]:
        return self._candidates

    def attention(
        self,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        mask: Mask,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :func:`accelbridge.ops.attention`."""
        from accelbridge.portable.attention import PortableAttention

        request = _request(q_BHSD, k_BGSD, mask, softcap, return_lse)
        chosen = next((each for each in self._candidates if each.supports(request)), None)
        call = PortableAttention().attention if chosen is None else chosen.load()
        return call(q_BHSD, k_BGSD, v_BGSD, mask, scale=scale, softcap=softcap, return_lse=return_lse)


def _request(q: Tensor, k: Tensor, mask: Mask, softcap: float | None, return_lse: bool) -> Request:
    """What the plan would have asked for such a call. Tensors that make no call are left for the call to refuse."""
    asked = {
        "causal": mask.causal,
        "window": mask.window is not None,
        "segments": mask.segments_BS is not None,
        "softcap": softcap is not None,
        "lse": return_lse,
        "gqa": q.dim() == k.dim() == 4 and q.shape[1] != k.shape[1],
    }
    sizes = {"head_dim": q.shape[3], "heads": q.shape[1], "kv_heads": k.shape[1], "sequence": k.shape[2]} if (
        q.dim() == k.dim() == 4
    ) else {}  # fmt: skip
    needs = frozenset(need for need, wanted in asked.items() if wanted)
    return Request("attention", str(q.dtype).removeprefix("torch."), sizes, needs=needs)
