"""Kernels compiled for chips that are not here, each in a child process with a time limit, and what the machine code is
made of.

    with Compiler(cache) as compiler:
        found = compiler.compile(case, tile, TARGETS["sm90"])

A server process imports triton and torch once and forks for each kernel, so that a compiler that hangs or crashes ends
its own process only. What was compiled is kept in ``cache``, by triton itself.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from accelbridge.kernels.tiles import Tile

SECONDS = 120.0
"""For one kernel, before it is given up."""


@dataclass(frozen=True)
class Target:
    """A chip, as triton's compiler calls it."""

    name: str
    backend: str
    arch: int | str
    warp: int
    tiles: str
    """The module that holds its tiles."""


def _nvidia(arch: int) -> Target:
    return Target(f"sm{arch}", "cuda", arch, 32, "accelbridge_cuda.tiles")


def _amd(arch: str) -> Target:
    return Target(arch, "hip", arch, 64, "accelbridge_rocm.tiles")


TARGETS = {
    target.name: target for target in (*map(_nvidia, (80, 90, 100, 120)), *map(_amd, ("gfx90a", "gfx942", "gfx950")))
}
NO_SPILLS = ("sm90", "sm100", "gfx942", "gfx950")
"""Where kernels that run in training must not spill."""


SAMPLED = ("sm90", "gfx942")
"""Chips for which every run of all tests compiles a few cases; ``make test-kernels`` compiles all of them for all."""


@dataclass(frozen=True)
class Case:
    """One kernel with the types of its arguments, for one chip or all of them."""

    tile: str
    """The name of its tile, by which tables call it; with ``label`` it is unique."""
    kernel: str
    """"module:function"."""
    arguments: Mapping[str, str]
    """Types by parameter, as triton spells them: "*bf16", "fp32", "i32"; "i32:16" is a multiple of 16."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """By parameter, besides those that the tile gives; the text "tl.bfloat16" is triton's dtype, None an absent
    pointer."""
    label: str = ""
    """What tells it from others with the same tile."""
    multiplies: str = ""
    """What its matrix instructions must multiply: "bf16", "fp32", "fp8", "mx"; "": it has none."""
    sampled: bool = False
    """Whether it is compiled in every run of all tests, for the chips of SAMPLED."""

    @property
    def name(self) -> str:
        return f"{self.tile} {self.label}".strip()


@dataclass(frozen=True)
class Compiled:
    """What became of a case; ``error`` says why nothing did."""

    error: str = ""
    registers: int = 0
    """Of each thread: 32-bit ones; on AMD vector registers, accumulation registers included."""
    spilled: int = 0
    """Bytes of each thread's registers that lie in memory instead; on AMD, of its scratch."""
    shared: int = 0
    """Bytes that a program shares."""
    instructions: int = 0
    """In the whole kernel."""
    matrix: Mapping[str, int] = field(default_factory=dict)
    """Matrix instructions by mnemonic."""
    seconds: float = 0.0

    @property
    def mnemonic(self) -> str:
        return max(self.matrix, key=lambda name: self.matrix[name], default="")


@cache
def tiles_of(target: Target) -> tuple[Mapping[str, Tile], Mapping[str, str]]:
    """The tiles that are shipped for it, and what it does not get, with reasons."""
    module = import_module(target.tiles)
    return module.tiles(target.name), module.lacking(target.name)


def shared_bytes(target: Target) -> int:
    """What a program may share at most."""
    return import_module(target.tiles).SHARED_BYTES[target.name]


# ------------------------------------------------------------------------------------------------------- compiling


class Compiler:
    """The server, from this side."""

    def __init__(self, cache: Path, seconds: float = SECONDS) -> None:
        self._cache, self._seconds = cache, seconds
        self._server: subprocess.Popen[str] | None = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._server is None:
            return
        try:
            self._server.communicate(timeout=10)  # it ends when no more is asked, also where SIGTERM is ignored
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def compile(self, case: Case, tile: Tile, target: Target) -> Compiled:
        """Compile ``case`` with ``tile`` for ``target``; an error of any kind is part of the answer."""
        server = self._server = self._server or self._start()
        assert server.stdin is not None
        assert server.stdout is not None
        asked = {"case": asdict(case), "tile": asdict(tile), "target": asdict(target), "seconds": self._seconds}
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server of compilations ended with {server.wait()}")
        return Compiled(**json.loads(answer))

    def _start(self) -> subprocess.Popen[str]:
        variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        variables |= {"TRITON_CACHE_DIR": str(self._cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.aot"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            text=True,
            cwd=Path(__file__).parents[2],
        )


def serve() -> None:
    """Answer requests, a line each, until there are no more."""
    import_module("triton.compiler")
    import_module("torch")
    for line in sys.stdin:
        asked = json.loads(line)
        import_module(asked["case"]["kernel"].partition(":")[0])
        print(json.dumps(_in_child(asked)), flush=True)


def _in_child(asked: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os.setsid()  # assemblers are processes of its own, and end with it
        os.dup2(2, 1)  # what a compiler prints is not an answer
        found = json.dumps(_compile(asked)).encode()
        with os.fdopen(theirs, "wb") as pipe:
            pipe.write(found)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        answered = select.select([pipe], [], [], asked["seconds"])[0]
        if not answered:
            os.killpg(child, signal.SIGKILL)
        text = pipe.read() if answered else b""
    _, status = os.waitpid(child, 0)
    if text:
        return json.loads(text) | {"seconds": round(time.monotonic() - began, 2)}
    if not answered:
        return {"error": f"not compiled within {asked['seconds']:.0f} s"}
    return {"error": f"the compiler's process ended with signal {status & 127}, exit code {status >> 8}"}


def _compile(asked: dict[str, Any]) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    case, tile, target = Case(**asked["case"]), Tile(**asked["tile"]), Target(**asked["target"])
    options = {key: value for key, value in tile.launch.items() if key not in tile.blocks}
    try:
        gpu = GPUTarget(target.backend, target.arch, target.warp)
        kernel = triton.compile(_source(case, tile, target), target=gpu, options=options)
        return _described(kernel, target)
    except Exception as raised:  # of any kind: it is what is asked for
        error: BaseException = raised
        while error.__cause__ is not None:  # errors in functions that a kernel calls are wrapped, once for each
            error = error.__cause__
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[-600:]}"}


def _source(case: Case, tile: Tile, target: Target) -> Any:
    import triton.language as tl
    from triton.compiler import ASTSource

    module, _, name = case.kernel.partition(":")
    function = getattr(import_module(module), name)
    given = {**case.constants, **tile.blocks}
    constants = {key: getattr(tl, value[3:]) if str(value).startswith("tl.") else value for key, value in given.items()}
    signature, attributes = {}, {}
    for index, parameter in enumerate(function.arg_names):
        if parameter in constants:
            signature[parameter] = "constexpr"
            continue
        signature[parameter], _, multiple = case.arguments[parameter].partition(":")
        if multiple or signature[parameter].startswith("*"):
            attributes[index,] = [["tt.divisibility", 16]]
        if signature[parameter].startswith("*") and target.backend == "hip":
            attributes[index,].append(["tt.pointer_range", 32])  # as at run time, for tensors below 2 GiB
    return ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)


# ----------------------------------------------------------------------------------------------------- machine code

_MATRIX = {
    "cuda": re.compile(r"\b(wgmma\.mma_async\S+|tcgen05\.mma\S+|mma\.sync\S+)"),
    "hip": re.compile(r"\b(v_s?mfmac?_\S+|v_wmma_\S+)"),
}
TYPES = {
    "fp8": re.compile(r"e4m3|e5m2|kind::f8f6f4|fp8|bf8|f8f6f4"),
    "bf16": re.compile(r"bf16|kind::f16"),
    "fp32": re.compile(r"x\d+_?f32$"),
    "mx": re.compile(r"mxf8f6f4|mx.*block_scale|scale_f32_\S*f8f6f4"),
}
"""What a mnemonic holds that multiplies such numbers."""


def _described(kernel: Any, target: Target) -> dict[str, Any]:
    assembly = kernel.asm["ptx" if target.backend == "cuda" else "amdgcn"]
    matrix: dict[str, int] = {}
    for mnemonic in _MATRIX[target.backend].findall(assembly):
        matrix[mnemonic] = matrix.get(mnemonic, 0) + 1
    found = {"shared": kernel.metadata.shared, "matrix": matrix}
    return found | (_cubin(kernel) if target.backend == "cuda" else _amdgcn(assembly))


def _cubin(kernel: Any) -> dict[str, int]:
    """By the vendor's own tools, which come with triton. A frame on the stack is what was spilled: these kernels have
    no arrays that would lie there."""
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        run = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(run, capture_output=True, text=True, check=True, timeout=60).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", told)
    assert used is not None, told
    return {"registers": int(used[1]), "spilled": int(used[2]), "instructions": _sass_lines(kernel.asm["sass"])}


def _sass_lines(text: str) -> int:
    """Instructions, one a line after its dependencies; those that fill up the end of the code are none."""
    lines = [line for line in text.splitlines() if re.match(r"^[-\w]+:[-\w]+:[-\w]+:[-\w]+:[-\w]+\t", line)]
    return sum("\tNOP" not in line for line in lines)


def _amdgcn(assembly: str) -> dict[str, int]:
    def number(pattern: str) -> int:
        found = re.search(pattern, assembly)
        return int(found[1]) if found else 0

    return {
        "registers": number(r"\.vgpr_count:\s+(\d+)"),
        "spilled": number(r"\.private_segment_fixed_size:\s+(\d+)"),
        "instructions": len(re.findall(r"^\t(?:s|v|ds|buffer|global|flat|scratch)_\w+", assembly, re.MULTILINE)),
    }


# ----------------------------------------------------------------------------------------------------- what is asked


def cases_of(family: str) -> list[tuple[Target, Case]]:
    """All cases of ``tests.kernels.cases.<family>``, for every target."""
    cases = import_module(f"tests.kernels.cases.{family}").cases
    return [(target, case) for target in TARGETS.values() for case in cases(target.name)]


def parameters(family: str) -> list[Any]:
    """:func:`cases_of`, for parametrize; all but the sample are marked ``full``."""
    import pytest

    def marks(target: Target, case: Case) -> list[Any]:
        return [] if case.sampled and target.name in SAMPLED else [pytest.mark.full]

    return [
        pytest.param(target, case, id=f"{target.name} {case.name}", marks=marks(target, case))
        for target, case in cases_of(family)
    ]


def check(compiler: Compiler, target: Target, case: Case) -> None:
    """Assert that ``case`` compiles for ``target`` to what it must be, or is declared not to be shipped there."""
    tiles, lacking = tiles_of(target)
    assert (case.tile in tiles) != (case.tile in lacking), (
        f"{case.tile} is neither shipped for {target.name} nor lacking"
    )
    if case.tile in tiles:
        assert faults(case, target, compiler.compile(case, tiles[case.tile], target)) == []
    else:
        assert lacking[case.tile]


def faults(case: Case, target: Target, found: Compiled) -> list[str]:
    """What is wrong with the machine code of ``case``; nothing, where all is as it must be."""
    if found.error:
        return [found.error]
    wrong = []
    if found.shared > shared_bytes(target):
        wrong.append(f"shares {found.shared} bytes, of which there are {shared_bytes(target)}")
    if found.spilled and target.name in NO_SPILLS:
        wrong.append(f"spills {found.spilled} bytes")
    if case.multiplies:
        others = [name for name in found.matrix if not TYPES[case.multiplies].search(name)]
        if others or not found.matrix:
            wrong.append(f"multiplies {case.multiplies} by {', '.join(others) or 'no matrix instruction'}")
    elif found.matrix:
        wrong.append(f"multiplies by {', '.join(found.matrix)}, though it says it doesn't")
    return wrong


if __name__ == "__main__":
    serve()
