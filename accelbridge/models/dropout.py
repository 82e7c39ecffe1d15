"""Dropout as a module, on :func:`accelbridge.ops.dropout`: the same mask in every layout."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from accelbridge import ops
from accelbridge.ops.keyed_dropout import open_stream


class Dropout(nn.Module):
    """Zero elements with probability ``p`` and divide the rest by ``1 - p``, in training only.

    What ``nn.Dropout`` is to one device this is to all layouts: its mask is a function of the trainer's seed, the
    step, this module's name in the model, the sample and the element, not of a rank's generator. Use it in any
    model that a Trainer trains:

        from accelbridge.models import Dropout
        self.attention_dropout, self.ffn_dropout = Dropout(0.1), Dropout(0.1)

    The input is ``[B, ...]``, one row per sample of the batch, in its order. Use a module of its own at each place:
    called twice in one forward pass, a module draws the same mask twice. In a loop of your own see
    :func:`name_sites` and :func:`accelbridge.ops.dropout_stream`; without them it raises ``RuntimeError`` in
    training. With ``p == 0`` and in eval mode it is the identity and needs neither. Raises ``ValueError`` for ``p``
    outside [0, 1).
    """

    site: Tensor
    """0-d int32: see :func:`accelbridge.ops.dropout`."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"Dropout takes a probability p of at least 0 and below 1; found {p}")
        self.p = p
        self._site = 0
        self._named = False
        self._places: dict[int, tuple[int, int]] = {}
        # Never on the meta device: it has a value, and no rule would fill it.
        self.register_buffer("site", torch.zeros((), dtype=torch.int32, device="cpu"), persistent=False)

    def name_site(self, name: str) -> None:
        """Draw as the module called ``name``: by the first 31 bits of its SHA-256."""
        self._site = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1
        self._named = True
        self._fill()

    def place(self, dim: int, start: int, total: int) -> None:
        """Say that dimension ``dim`` of the input is a slice, from ``start`` on, of one that is ``total`` long.

        The slice then draws what it would draw within the whole. ``dim`` may count from the end; dimensions that
        are not placed are whole. Raises ``ValueError`` for the batch, whose rows carry keys of their own, and for a
        slice outside of the whole (one that turns out too long, when it is seen).
        """
        if dim == 0:
            raise ValueError("dimension 0 asked; it is the batch, whose rows carry keys of their own; place another")
        if not 0 <= start < total:
            raise ValueError(f"a slice from {start} on asked; the whole dimension {dim} is {total} long")
        self._places[dim] = (start, total)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keys_B = open_stream()
        if not self._named:
            raise RuntimeError(
                "dropout in training asked; this Dropout has no name, by which it draws unlike the others; call "
                "accelbridge.models.name_sites(model) once, after the model is built (Trainer does)"
            )
        return ops.dropout(x, keys_B, self.site, self.p, self._starts(x))

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def _starts(self, x: Tensor) -> tuple[int, ...]:
        starts = [0] * (x.dim() - 1)
        for dim, (start, total) in self._places.items():
            axis = dim + x.dim() if dim < 0 else dim
            if not 0 < axis < x.dim() or start + x.shape[axis] > total:
                raise ValueError(
                    f"Dropout was placed at {start} of {total} along dimension {dim}; found x {tuple(x.shape)}, which "
                    "does not fit there; place() it anew"
                )
            starts[axis - 1] = start
        return tuple(starts)

    def _fill(self) -> None:
        if not self.site.is_meta:
            self.site.fill_(self._site)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Dropout:
        super()._apply(fn, recurse)
        self._fill()  # to_empty() leaves memory as it finds it
        return self


def name_sites(model: nn.Module) -> list[Dropout]:
    """Give every :class:`Dropout` of ``model`` its full name to draw by, and return those that draw (p > 0).

    Call it once on the whole model, before it is wrapped: wrappers that rename modules would change the masks.
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Dropout)]
    for name, module in found:
        module.name_site(name)
    return [module for _, module in found if module.p > 0]
