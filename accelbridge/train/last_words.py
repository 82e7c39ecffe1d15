"""What a rank says as it ends: to our launcher through its error file, to others on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from accelbridge.train.world import BY_US, launched


def report(text: str, failed_at: float, last_seen: Mapping[str, str] | None = None) -> None:
    """Say why this rank ends, once.

    Args:
        failed_at: Unix time of the failure; of several, the launcher prints the first.
        last_seen: where ranks that can say nothing any more were, by rank.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if BY_US in os.environ and path is not None:
        words = {"message": text, "failed_at": failed_at, "last_seen": dict(last_seen or {})}
        Path(path).write_text(json.dumps(words), encoding="utf-8")
    else:
        rank = f"rank {os.environ.get('RANK', '?')}: " if launched() else ""
        print(f"error: {rank}{text}", file=sys.stderr, flush=True)
