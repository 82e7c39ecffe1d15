"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import cli


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token stores (train, validation) made from this package's own source."""
    out = tmp_path_factory.mktemp("data") / "source"
    package = Path(cli.__file__).parent.parent / "accelbridge"
    done = cli.run("data", "build", str(package), str(out), "--suffix", ".py", "--validation-fraction", "0.1")
    assert done.returncode == 0, done.stderr
    return out
