"""Read by Python when it starts: this process sees the host that the test laid out."""

import os
from pathlib import Path

if root := os.environ.get("NEURON_DOUBLE_ROOT"):
    from accelbridge_neuron import driver

    driver.ROOT = Path(root)
