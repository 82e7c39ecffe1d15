"""On the path of a rank's interpreter: when the trainer is imported, put in the faults that FAULTS names for it."""

import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder


class _AfterTrainer(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "accelbridge.train.trainer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_inject(module):
            load(module)
            from tests.faults.inject import inject

            inject(os.environ["FAULTS"], int(os.environ["RANK"]))

        spec.loader.exec_module = load_and_inject
        return spec


if "FAULTS" in os.environ and "RANK" in os.environ:  # a rank, not its launcher
    sys.meta_path.insert(0, _AfterTrainer())
