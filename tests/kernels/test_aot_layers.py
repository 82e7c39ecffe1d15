"""rms_norm, rope, swiglu and the losses, compiled ahead of time for chips that are not here."""

from __future__ import annotations

import pytest

from tests.kernels.aot import Case, Compiler, Target, check, parameters


@pytest.mark.parametrize(("target", "case"), parameters("layers"))
def test_it_compiles_or_is_declared_not_to(compiler: Compiler, target: Target, case: Case) -> None:
    check(compiler, target, case)
