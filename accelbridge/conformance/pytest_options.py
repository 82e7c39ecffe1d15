"""Options of ``pytest --pyargs accelbridge.conformance.suite``: a plugin of pytest, as options of a package's conftest
are not known yet when the command line is read. Imports nothing else."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("accelbridge conformance")
    group.addoption("--ab-backend", metavar="NAME", help="backend to test")
    group.addoption("--ab-level", metavar="LEVEL[,LEVEL]", default="core", help="levels to test")
    group.addoption("--ab-option", metavar="A=B", action="append", default=[], help="option of the backend; repeatable")
