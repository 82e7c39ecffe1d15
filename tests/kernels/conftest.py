"""These tests are collected where nothing but they was asked for: triton decides when it is imported whether kernels
are interpreted, for the whole process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.kernels.aot import Compiler

FOLDER = Path(__file__).resolve().parent


def alone(config: pytest.Config) -> bool:
    """Whether every path that was asked for lies in this folder."""
    paths = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    return bool(paths) and all(path == FOLDER or FOLDER in path.parents for path in paths)


def pytest_configure(config: pytest.Config) -> None:
    if not alone(config):
        return
    if find_spec("triton") is None:
        raise pytest.UsageError("tests/kernels asked; triton is not installed; install accelbridge[kernels]")
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("tests/kernels asked; triton is imported already, to compile; leave out what did so")
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's products otherwise wait for threads that spin
    from tests.kernels import interpreter

    interpreter.install()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if alone(config) else True


@pytest.fixture(scope="session")
def compiler(pytestconfig: pytest.Config) -> Iterator[Compiler]:
    """A server of compilations; what was compiled before is kept beside pytest's own cache."""
    with Compiler(pytestconfig.cache.mkdir("triton")) as found:
        yield found


@pytest.fixture(autouse=True)
def no_tiles() -> Iterator[None]:
    """Each test binds the tiles that it wants."""
    from accelbridge.kernels import tiles

    tiles.reset()
    yield
    tiles.reset()
