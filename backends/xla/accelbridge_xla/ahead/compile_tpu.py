"""A script for another interpreter, which has jax and libtpu and not this package: compiles FOLDER/program.pb.

    python compile_tpu.py FOLDER TOPOLOGY

TOPOLOGY is libtpu's name ("v5p:4x4x4"). Writes compiled.json: memory by kind and FLOPs per device, as the executable
tells them, and optimised.hlo, the program that one device would run. Without a device: ``topologies`` describes
absent ones, and nothing is loaded or run.

The program comes as HLO and goes through StableHLO, whose attributes say where arguments and results lie
(``mhlo.sharding``) and which argument each result may overwrite (``tf.aliasing_output``), as jax's own lowering does.
"""

# pyright: reportMissingImports=false
# (jax lies in the other environment)

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # its lock file is for processes that open chips; we open none
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
SIZES = {
    "arguments": "argument_size_in_bytes",
    "outputs": "output_size_in_bytes",
    "aliased": "alias_size_in_bytes",
    "temporaries": "temp_size_in_bytes",
    "code": "generated_code_size_in_bytes",
}

PR_SET_PDEATHSIG = 1
"""linux/prctl.h: a signal for this process when its parent ends."""


def main(folder: Path, topology: str) -> None:
    began = time.monotonic()
    end_with_parent()
    os.environ.update(ENVIRONMENT)
    import jax
    import numpy as np
    from jax._src import compiler
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    found: dict = {"jax": jax.__version__, "topology": topology}
    if find_spec("libtpu") is None:
        found["missing"] = "libtpu"
        return write(folder, found, began)
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError) as error:  # a name that it does not know
        found["refused"] = str(error)
        return write(folder, found, began)
    devices = described.devices
    client = devices[0].client
    found |= {"libtpu": libtpu_version(), "kind": devices[0].device_kind, "devices": len(devices)}
    if not (folder / "program.pb").exists():  # only asked what there is
        return write(folder, found, began)
    facts = json.loads((folder / "program.json").read_text())
    module = annotated((folder / "program.pb").read_bytes(), facts)
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.arange(len(devices)).reshape(1, -1),
    )
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = False
    try:
        executable = client.compile(module, xla_client.DeviceList(tuple(devices)), options)
    except jax.errors.JaxRuntimeError as error:  # memory exceeded, or a program that it cannot take
        found["error"] = str(error)
        return write(folder, found, began)
    stats = executable.get_compiled_memory_stats()
    found["memory"] = {
        name: getattr(stats, attribute) for name, attribute in SIZES.items() if hasattr(stats, attribute)
    }
    found["cost"] = {key: value for key, value in costs(executable).items() if key in ("flops", "bytes accessed")}
    (folder / "optimised.hlo").write_text(executable.hlo_modules()[0].to_string())
    return write(folder, found, began)


def end_with_parent() -> None:
    """Whoever asked may be killed, and then nobody is left to end a compilation of many minutes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def annotated(program: bytes, facts: dict):
    """StableHLO of ``program``, with the places of its arguments and results, and what is donated."""
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    text = xla_client._xla.mlir.hlo_to_stablehlo(program)
    context = mlir.make_ir_context()
    with context:
        module = ir.Module.parse(text)
        (main_,) = [op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main"]
        arguments = [dict_of(each) for each in main_.arg_attrs]
        for value in facts["inputs"]:
            arguments[value["parameter"]]["mhlo.sharding"] = ir.StringAttr.get(value["sharding"])
        results = []
        for index, value in enumerate(facts["outputs"]):
            results.append({"mhlo.sharding": ir.StringAttr.get(value["sharding"])})
            if value["parameter"] is not None:
                number = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), index)
                arguments[value["parameter"]]["tf.aliasing_output"] = number
        main_.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in arguments])
        main_.attributes["res_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(each) for each in results])
        return module


def dict_of(attributes) -> dict:
    return {each.name: each.attr for each in attributes}


def costs(executable) -> dict:
    found = executable.cost_analysis()
    return found[0] if isinstance(found, list) else found


def libtpu_version() -> str:
    from importlib.metadata import version

    return version("libtpu")


def write(folder: Path, found: dict, began: float) -> None:
    found["seconds"] = round(time.monotonic() - began, 1)
    found["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    (folder / "compiled.json").write_text(json.dumps(found, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
