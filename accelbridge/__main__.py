"""``python -m accelbridge`` is the ``accelbridge`` command."""

from accelbridge.cli import main

main()
