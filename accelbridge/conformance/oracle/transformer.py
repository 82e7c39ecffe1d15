"""A small transformer, trained on the host: in float64, and in float32 in several orders of sums.

What the order of sums alone makes of a run in float32 is the measure for a sharded one, which has yet another order.
The order is changed by giving the heads, the units of the feed-forward layers, the dimensions of the residual stream
and the rows of a batch other places, none of which changes the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelbridge.conformance.oracle.training import AdamW

VOCABULARY, DIM, HEADS, UNITS, LAYERS, LENGTH = 13, 16, 4, 24, 2, 8
PERMUTATIONS = 8
IGNORED = -100
_HEAD_DIM = DIM // HEADS
Parameters = dict[str, Tensor]


class Scale(nn.Module):
    """Root mean square normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight


class Block(nn.Module):
    """Causal attention and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_units = Scale(), Scale()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, UNITS), nn.Linear(UNITS, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before_attention(x)
        q, k, v = (layer(h).unflatten(-1, (HEADS, _HEAD_DIM)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(_HEAD_DIM)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.before_units(x)), approximate="tanh"))


class Transformer(nn.Module):
    """``tokens`` int64 [B, S] to logits [B, S, V]; nothing but torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Scale(), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def initial(draw: Callable[..., Tensor]) -> Parameters:
    """First values; ``draw(*shape, name=...)`` is standard normal."""
    values: Parameters = {}
    for name, parameter in Transformer().named_parameters():
        if parameter.dim() == 1:
            values[name] = torch.ones_like(parameter) if "bias" not in name else torch.zeros_like(parameter)
        else:
            values[name] = (draw(*parameter.shape, name=name) / math.sqrt(parameter.shape[1])).float()
    return values


_WAYS: Mapping[str, tuple[str | None, ...]] = {
    "embed.weight": (None, "dim"),
    "head.weight": (None, "dim"),
    **{f"{name}.weight": ("heads", "dim") for name in ("q", "k", "v")},
    "o.weight": ("dim", "heads"),
    "up.weight": ("units", "dim"),
    "up.bias": ("units",),
    "down.weight": ("dim", "units"),
    "down.bias": ("dim",),
    **{f"{name}.weight": ("dim",) for name in ("norm", "before_attention", "before_units")},
}
"""What runs along each dimension of a parameter, by the end of its name."""


def _orders(number: int) -> dict[str, Tensor]:
    """Places of order ``number`` (0: as they are)."""
    generator = torch.Generator().manual_seed(number)

    def places(size: int) -> Tensor:
        return torch.randperm(size, generator=generator) if number else torch.arange(size)

    heads = places(HEADS).unsqueeze(1) * _HEAD_DIM + torch.arange(_HEAD_DIM)
    return {"heads": heads.flatten(), "units": places(UNITS), "dim": places(DIM)}


def _moved(values: Mapping[str, Tensor], orders: Mapping[str, Tensor]) -> Parameters:
    moved: Parameters = {}
    for name, value in values.items():
        ways = next(ways for end, ways in _WAYS.items() if name == end or name.endswith(f".{end}"))
        for dim, way in enumerate(ways):
            value = value if way is None else value.index_select(dim, orders[way])
        moved[name] = value
    return moved


@dataclass(frozen=True)
class Trained:
    """A run: the mean loss of each step, and the parameters at its end."""

    losses: Tensor
    parameters: Parameters


def train(
    values: Parameters, tokens: Tensor, targets: Tensor, steps: int, optimizer: AdamW, clip: float,
    dtype: torch.dtype = torch.float64, order: int = 0,
) -> Trained:  # fmt: skip
    """``steps`` updates on batches ``tokens[step]``; matrices are decayed, vectors are not. Losses are means over
    targets."""
    orders = _orders(order)
    model = Transformer().to(dtype)
    model.load_state_dict(_moved(values, orders))
    parameters = list(model.parameters())
    undecayed = AdamW(optimizer.rate, optimizer.beta1, optimizer.beta2, optimizer.eps)
    moments = [[torch.zeros_like(p.data), torch.zeros_like(p.data)] for p in parameters]
    rows = torch.randperm(tokens.shape[1], generator=torch.Generator().manual_seed(order)) if order else slice(None)
    losses: list[float] = []
    for number in range(1, steps + 1):
        logits = model(tokens[number - 1][rows])
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[number - 1][rows].flatten(), ignore_index=IGNORED)
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.stack([g.norm() for g in gradients]).norm()
        factor = (clip / (norm + 1e-6)).clamp(max=1.0)
        for parameter, gradient, pair in zip(parameters, gradients, moments, strict=True):
            rule = optimizer if parameter.dim() > 1 else undecayed
            rule.update(parameter.data, gradient * factor, pair, number)
        losses.append(float(loss.detach()))
    back = {way: places.argsort() for way, places in orders.items()}
    return Trained(torch.tensor(losses, dtype=torch.float64), _moved(dict(model.state_dict()), back))


@dataclass(frozen=True)
class Envelope:
    """The run in float64, and how far float32 strays from it in other orders of sums."""

    exact: Trained
    losses: Tensor
    """Largest deviation of any order up to each step."""
    floors_db: Mapping[str, float]
    """Lowest SQNR of each parameter at the end."""


def envelope(
    values: Parameters, tokens: Tensor, targets: Tensor, steps: int, optimizer: AdamW, clip: float
) -> Envelope:
    """Of :data:`PERMUTATIONS` orders. No envelope is narrower than the last bits of float32: 2^-22, relative."""
    exact = train(values, tokens, targets, steps, optimizer, clip)
    runs = [
        train(values, tokens, targets, steps, optimizer, clip, torch.float32, order)
        for order in range(1, PERMUTATIONS + 1)
    ]
    strayed = torch.stack([(run.losses - exact.losses).abs() for run in runs]).amax(0)
    strayed = torch.maximum(strayed.cummax(0).values, exact.losses * 2.0**-22)
    floors: dict[str, float] = {}
    for name, want in exact.parameters.items():
        noise = max(float((run.parameters[name].double() - want).norm() / want.norm()) for run in runs)
        floors[name] = -20 * math.log10(max(noise, 2.0**-22))
    return Envelope(exact, strayed, floors)
