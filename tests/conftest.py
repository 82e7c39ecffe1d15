"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import cli


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token stores (train, validation) made from this package's own source."""
    return cli.build_store(tmp_path_factory.mktemp("data") / "source")
