"""Names and shapes of a decoder's parameters and how they may be split, for what is decided before torch is loaded."""

from __future__ import annotations

from accelbridge.models.config import ModelConfig
from accelbridge.parallel.spec import ShardingSpec

DECODER_SPEC = ShardingSpec(
    units=("layers.*",),
    tensor_parallel={
        "embed": "vocab_embedding",
        "*_dropout": "hidden",
        "layers.*.*_norm": "hidden",
        "layers.*.*_dropout": "hidden",
        "layers.*.attention": "enter",
        "layers.*.attention.[qkv]": "column",
        "layers.*.attention.o": "row",
        "layers.*.ffn": "enter",
        "layers.*.ffn.gate": "column",
        "layers.*.ffn.up": "column",
        "layers.*.ffn.down": "row",
        "norm": "hidden",
        "head": "vocab_head",
    },
)
"""Of :class:`accelbridge.models.decoder.Decoder`."""


def decoder_linears(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Full name -> (out, in) of its linear layers with a weight of their own."""
    shapes = {name.removesuffix(".weight"): shape for name, shape in decoder_shapes(model).items()}
    return {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2 and name != "embed"}


def decoder_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Full name -> full shape of every parameter of :class:`accelbridge.models.decoder.Decoder`, in its order."""
    dim, ffn = model.dim, model.resolved_ffn_dim
    width, kv_width = (n * model.resolved_head_dim for n in (model.heads, model.resolved_kv_heads))
    layer = {
        "attention_norm": (dim,),
        "attention.q": (width, dim),
        "attention.k": (kv_width, dim),
        "attention.v": (kv_width, dim),
        "attention.o": (dim, width),
        "ffn_norm": (dim,),
        "ffn.gate": (ffn, dim),
        "ffn.up": (ffn, dim),
        "ffn.down": (dim, ffn),
    }
    owners: dict[str, tuple[int, ...]] = {"embed": (model.vocab_size, dim)}
    for index in range(model.layers):
        owners |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    owners["norm"] = (dim,)
    if not model.tie_embeddings:
        owners["head"] = (model.vocab_size, dim)
    return {f"{name}.weight": shape for name, shape in owners.items()}
