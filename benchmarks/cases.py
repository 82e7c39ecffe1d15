"""What is trained: sizes, data, order and initial values, in a folder that every loop reads."""

from __future__ import annotations

import json
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from accelbridge.data.loader import Loader, PackedSamples
from accelbridge.data.store import TokenStore, TokenWriter
from accelbridge.data.tokenizer import ByteTokenizer
from accelbridge.models.config import ModelConfig
from accelbridge.models.decoder import Decoder

CORPUS_BYTES = 1_000_000
SEED = 0


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    model: dict[str, int]
    global_batch_size: int
    seq_len: int


SIZES = {
    "demo": Size(
        {"vocab_size": 257, "dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_dim": 448},
        global_batch_size=16,
        seq_len=128,
    ),
    "larger": Size(
        {"vocab_size": 257, "dim": 256, "layers": 6, "heads": 4, "kv_heads": 2, "ffn_dim": 704},
        global_batch_size=8,
        seq_len=256,
    ),
    "vocabulary": Size(
        {"vocab_size": 65536, "dim": 384, "layers": 1, "heads": 4, "kv_heads": 2, "ffn_dim": 704},
        global_batch_size=2,
        seq_len=64,
    ),
    "tiny": Size(
        {"vocab_size": 257, "dim": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 64},
        global_batch_size=4,
        seq_len=32,
    ),
}
"""``demo`` is recipes/demo.yaml; in ``larger`` what is fixed per step weighs less, and in ``vocabulary``, whose
processes take more than 1 GB, what is fixed per process; ``tiny`` is for tests."""


def make_case(folder: Path, size: Size, steps: int, **settings: Any) -> dict[str, Any]:
    """Write tokens, order and initial values of ``steps`` steps to ``folder``; the case as every loop gets it."""
    folder.mkdir(parents=True)
    _write_store(folder / "store")
    store = TokenStore(folder / "store")
    np.save(folder / "tokens.npy", store.window(0, store.tokens).astype(np.uint16))
    np.save(folder / "order.npy", _order(store, size, steps))
    decoder = Decoder(ModelConfig.model_validate(size.model))
    decoder.reset_parameters(SEED)
    torch.save(decoder.state_dict(), folder / "state.pt")
    case: dict[str, Any] = {
        "folder": str(folder),
        "model": size.model,
        "end_of_document": store.index.eod,
        "seq_len": size.seq_len,
        "global_batch_size": size.global_batch_size,
        "steps": steps,
        "seed": SEED,
        "lr": 1e-3,
        "warmup_steps": min(10, steps // 2),
        "weight_decay": 0.1,
        "clip_norm": 1.0,
        "metrics_interval": 10,
        "compute": "float32",
        "parallel": {"dp_shard": "auto", "zero": 3},
        "own_model": True,
    }
    return json.loads(json.dumps(case | settings))


def _write_store(out: Path) -> None:
    """Source files of the Python standard library, each a document."""
    left = CORPUS_BYTES
    with TokenWriter(out, ByteTokenizer()) as writer:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text = path.read_bytes()[:left].decode("utf-8", errors="ignore")
            writer.append(ByteTokenizer().encode(text))
            left -= len(text.encode())
            if left < CORPUS_BYTES // 100:
                return


def _order(store: TokenStore, size: Size, steps: int) -> np.ndarray:
    """Sample numbers int64 [steps, global batch], as the Trainer deals them out."""
    loader = Loader(
        PackedSamples(store, size.seq_len),
        global_batch_size=size.global_batch_size,
        microbatch_size=1,
        coordinates=range(1),
        data_parallel=1,
        seed=SEED,
        shuffle=True,
    )
    return loader.indices(np.arange(steps * size.global_batch_size).reshape(steps, -1))
