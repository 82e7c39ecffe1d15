"""What a level asks of the capability table; the list ships with the suite."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files


@cache
def mandatory(level: str) -> tuple[tuple[str, str, str], ...]:
    """Cells (op, dtype, variant) that ``level`` itself demands, besides those of the levels that it needs."""
    text = files("accelbridge.conformance.spec").joinpath("mandatory.toml").read_text()
    rows = tomllib.loads(text).get(level, {})
    return tuple(
        (op, dtype, variant)
        for op, row in rows.items()
        for dtype in row["dtypes"]
        for variant in row.get("variants", [""])
    )
