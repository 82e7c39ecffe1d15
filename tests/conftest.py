"""Fixtures that several test files share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import cli


@pytest.fixture
def unbound() -> Iterator[None]:
    """For tests that train in this process: what their plans have bound does not outlast them."""
    yield
    if (ops := sys.modules.get("accelbridge.ops")) is not None:
        ops.reset()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token stores (train, validation) made from this package's own source."""
    return cli.build_store(tmp_path_factory.mktemp("data") / "source")
