"""What several tests of attention's kernel share."""

from __future__ import annotations

import torch
from torch import Tensor

from accelbridge import ops
from accelbridge.kernels.flash_candidate import BLOCKS_D, KERNELS, variant
from accelbridge.kernels.tiles import Tile
from accelbridge.models import Decoder, ModelConfig

CONFIG = ModelConfig(vocab_size=60, dim=64, layers=1, heads=4, kv_heads=2, ffn_dim=32, window=20, softcap=15.0)
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 31, [0] * 33 + [1] * 7])


def some_tiles(queries: int, keys: int) -> dict[str, Tile]:
    """For every variant."""
    found = {"flash_delta": Tile({"QUERIES": 64}), "document_spans": Tile({"CHUNK": 64})}
    for kernel in KERNELS:
        last = {"DV_LAST": 1} if kernel == "flash_backward_dkdv" else {}
        for block in BLOCKS_D:
            for dtype in ("bfloat16", "float32"):
                found[f"{kernel}.{variant(block, dtype)}"] = Tile({"QUERIES": queries, "KEYS": keys, **last})
    return found


def decoder() -> Decoder:
    model = Decoder(CONFIG)
    model.reset_parameters(3)
    return model


def step(model: Decoder) -> Tensor:
    """The loss of one batch of documents, with the attention that is bound, and its gradients in the parameters."""
    tokens = torch.randint(0, CONFIG.vocab_size, DOCUMENTS.shape, generator=torch.Generator().manual_seed(5))
    logits = model(tokens, DOCUMENTS)
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    loss = ops.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    return loss.detach()
