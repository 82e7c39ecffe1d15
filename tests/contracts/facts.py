"""What is known of each vendor, one row per fact: tests/contracts/*.toml. The tests of a vendor's contract hold that
what pins a fact is there, and list what no official source says."""

from __future__ import annotations

import functools
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent


class Certainty(StrEnum):
    """How well a fact is known; none of these is a measurement of ours on the vendor's hardware."""

    DOCUMENTED = "documented"  # the vendor's documents say it
    IN_SOURCE = "read in source"  # of the vendor's own public code
    SECOND_HAND = "second hand"  # users' code, or a mirror that is not the vendor's
    NOT_VERIFIED = "not verified"  # inferred, or seen in one place only


OFFICIAL = frozenset({Certainty.DOCUMENTED, Certainty.IN_SOURCE})


class Fact(NamedTuple):
    """One row. `test` is the pytest id, from the root, of what pins it: what turns red where our code forgets it."""

    id: str
    vendor: str
    topic: str
    text: str
    source: str
    version: str
    date: str
    certainty: Certainty
    test: str


@functools.cache
def facts() -> dict[str, Fact]:
    """Every fact by id ("GAUDI-DEV-001"). Raises ValueError where an id is used twice or a field is missing."""
    rows: dict[str, Fact] = {}
    for file in sorted(FOLDER.glob("*.toml")):
        for row in tomllib.loads(file.read_text())["fact"]:
            if set(row) != set(Fact._fields) - {"vendor"}:
                raise ValueError(f"{file.name}: {row.get('id')}: fields {sorted(row)}")
            if row["id"] in rows:
                raise ValueError(f"{file.name}: {row['id']} is used twice")
            rows[row["id"]] = Fact(vendor=file.stem, **row | {"certainty": Certainty(row["certainty"])})
    return rows
