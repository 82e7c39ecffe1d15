"""``pytest --pyargs accelbridge.conformance.suite``, from an empty folder, as a vendor's CI has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .plugins_env import environment


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "--pyargs", "accelbridge.conformance.suite", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )


def test_the_suite_runs_under_pytest(tmp_path: Path) -> None:
    done = run(tmp_path, "--ab-backend", "cpu", "--ab-level", "core", "-k", "MM-007 or COL-007", "-v")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_conforms[MM-007] PASSED" in done.stdout
    assert "2 passed" in done.stdout


def test_a_level_that_is_none_is_said(tmp_path: Path) -> None:
    done = run(tmp_path, "--ab-backend", "cpu", "--ab-level", "cor")
    assert done.returncode != 0
    assert 'did you mean "core"' in done.stdout
