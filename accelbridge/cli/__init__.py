"""The command line. Importing it loads neither torch nor numpy, so that ``--help`` is instant."""

from accelbridge.cli.main import main

__all__ = ["main"]
