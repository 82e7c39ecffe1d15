"""A module of kernels with one fault in it, beside the sound one."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def sampled(mutants: Iterable[Any]) -> list[Any]:
    """Parameters of a test: every fourth belongs to each run of all tests, the others to ``make test-kernels``."""
    return [pytest.param(each, marks=[pytest.mark.full] if n % 4 else []) for n, each in enumerate(mutants)]


@contextmanager
def suppress_outside() -> Iterator[None]:
    """An access outside of a kernel's tensors ends the block quietly: it shows the fault, too."""
    from triton.runtime.errors import InterpreterError

    try:
        yield
    except InterpreterError as error:
        if "elements lie outside of" not in str(error):
            raise


def mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    """``module`` anew, with ``old``, which occurs in it, replaced by ``new``; its custom ops get names of their own."""
    source = inspect.getsource(module)
    assert old in source, f"{old!r} is not in {module.__name__}"
    mutant.count += 1  # pyright: ignore[reportFunctionMemberAccess]
    space = f"accelbridge_mutant{mutant.count}"  # pyright: ignore[reportFunctionMemberAccess]
    changed = re.sub(r'custom_op\("accelbridge::', f'custom_op("{space}::', source.replace(old, new))
    changed = changed.replace("torch.ops.accelbridge.", f"torch.ops.{space}.")
    path = folder / f"{space}.py"
    path.write_text(changed, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(space, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


mutant.count = 0  # pyright: ignore[reportFunctionMemberAccess]
