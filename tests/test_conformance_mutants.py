"""A sample of the suite's self-proof: what `make mutants` does for all pairs of mutant and test."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelbridge.conformance.mutants import mutants
from accelbridge.conformance.registry import cases
from accelbridge.conformance.selfproof import run_mutant

SAMPLE = {
    "A20": "ATT-008",  # one flipped sign in the backward pass of attention
    "L19": "COL-002",  # an all_reduce of 3 ranks that adds in bfloat16
    "G15": "MM-003",  # zeros in one row of 1024
    "F8h": "F8-002",  # fp8 that is claimed, and bfloat16 that is computed
    "I3": "INF-008",  # a candidate that silently runs something else
}


@pytest.mark.parametrize("mutant", SAMPLE)
def test_a_defect_is_caught_by_its_assertion(mutant: str, tmp_path: Path) -> None:
    (pair,) = run_mutant(mutants()[mutant], [cases()[SAMPLE[mutant]]], tmp_path)
    assert pair.good, pair.said
