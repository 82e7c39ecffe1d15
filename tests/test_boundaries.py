"""The core names no vendor, and a backend uses nothing but the public modules: read off the syntax trees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import accelbridge

CORE = Path(accelbridge.__file__).parent
ROOT = CORE.parent
MUTANTS = CORE / "conformance" / "mutants"
"""Seeded defects of the reference backend, to prove the conformance suite by."""

VENDORS = frozenset(
    {"cuda", "nccl", "cudnn", "nvidia", "rocm", "hip", "rccl", "hipblas", "amd", "hpu", "gaudi", "hccl", "habana",
     "intel", "xpu", "neuron", "nki", "trainium", "xla", "tpu", "mps", "npu", "musa", "ascend"}
)  # fmt: skip
NOT_VENDORS = frozenset({"amd64"})

PUBLIC = ("", "backend", "config", "errors", "hookspecs", "kernels", "ops", "parallel.layout", "parallel.spec",
          "portable", "precision")  # fmt: skip
"""What a backend may import of accelbridge ("" is the package itself, with the names in ``__all__``)."""
PUBLIC_PACKAGES = ("kernels", "ops", "portable", "precision")
"""Those of them whose submodules are public too."""


# ------------------------------------------------------------------------------------------------------ vendors


def words(text: str) -> set[str]:
    """``"is_cuda"``, ``"CudaDevice"``, ``"cuda:0"``, ``"cuda12"`` -> ``cuda`` among others; ``"chip"`` stays."""
    found = set()
    for part in re.findall(r"[A-Za-z0-9]+", text):
        pieces = re.findall(r"[A-Z]{2,}(?![a-z])\d*|[A-Z]?[a-z]+\d*|[A-Z]+|\d+", part)
        found |= {part.lower()} if part.lower() in NOT_VENDORS else {part.lower(), *map(str.lower, pieces)}
    return {word if word in NOT_VENDORS else word.rstrip("0123456789") for word in found}


def _docstrings(tree: ast.AST) -> set[int]:
    """Ids of the text constants that are statements of their own: docstrings of anything."""
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    return {id(value) for value in statements if isinstance(value, ast.Constant)}


def _texts(node: ast.AST) -> Iterator[str]:
    """Every name and text that ``node`` itself holds."""
    for _, value in ast.iter_fields(node):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                yield item
            elif isinstance(item, bytes):
                yield item.decode("latin-1")


def vendor_names(source: str) -> list[str]:
    """``"line: text"`` of each vendor that the code names, comments and docstrings left out."""
    tree = ast.parse(source)
    skip = _docstrings(tree)
    return [
        f"{getattr(node, 'lineno', '?')}: {text[:60]}"
        for node in ast.walk(tree)
        if id(node) not in skip
        for text in _texts(node)
        if words(text) & VENDORS
    ]


# ------------------------------------------------------------------------------------------------------ imports


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a module of ``package`` imports, also by name in a text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Constant) and re.fullmatch(r"accelbridge\w*(\.\w+)+", str(node.value)):
            yield node.lineno, str(node.value)


def is_public(name: str) -> bool:
    """Whether a backend may import ``name``, a module or a name in one."""
    path = name.removeprefix("accelbridge").lstrip(".")
    module, _, last = path.rpartition(".")
    if any(path == p or path.startswith(f"{p}.") for p in PUBLIC_PACKAGES):
        return True
    return path in PUBLIC or (module in PUBLIC and (bool(module) or last in accelbridge.__all__))


def private_imports(source: str, package: str, own: str) -> list[str]:
    """What a module of the backend ``own`` imports of accelbridge that is not public."""
    return [
        f"{line}: {name}"
        for line, name in imports(source, package)
        if re.match(r"accelbridge\b", name) and not f"{name}.".startswith(f"{own}.") and not is_public(name)
    ]


def backend_imports(source: str, package: str) -> list[str]:
    """What a module of the core imports of a backend."""
    pattern = r"accelbridge\.cpu(\.|$)|accelbridge_\w+"
    return [f"{line}: {name}" for line, name in imports(source, package) if re.match(pattern, name)]


# -------------------------------------------------------------------------------------------------------- files


def core_files() -> list[Path]:
    return sorted(CORE.rglob("*.py"))


def backend_packages() -> list[Path]:
    """The reference backend, and every package of ``backends/``."""
    return [CORE / "cpu", *sorted(path.parent for path in ROOT.glob("backends/*/accelbridge_*/__init__.py"))]


def package_of(path: Path, root: Path) -> str:
    return ".".join(path.parent.relative_to(root).parts)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_there_is_something_to_look_at() -> None:
    assert len(core_files()) > 50
    assert len(backend_packages()) >= 1


@pytest.mark.parametrize("path", core_files(), ids=relative)
def test_the_core_names_no_vendor(path: Path) -> None:
    assert vendor_names(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("folder", backend_packages(), ids=relative)
def test_a_backend_imports_public_modules_only(folder: Path) -> None:
    root = ROOT if folder == CORE / "cpu" else folder.parent
    own = ".".join(folder.relative_to(root).parts)
    problems = {
        relative(path): found
        for path in sorted(folder.rglob("*.py"))
        if (found := private_imports(path.read_text(encoding="utf-8"), package_of(path, root), own))
    }
    assert problems == {}


def test_the_core_imports_no_backend() -> None:
    problems = {
        relative(path): found
        for path in core_files()
        if not {CORE / "cpu", MUTANTS} & set(path.parents)
        and (found := backend_imports(path.read_text(encoding="utf-8"), package_of(path, ROOT)))
    }
    assert problems == {}


# ------------------------------------------------------------------------------------------- the checks can fail


@pytest.mark.parametrize(
    "code",
    [
        "import torch.cuda",
        "from torch import xpu",
        "import torch_xla.core as core",
        "from torch.backends.cuda import x",
        "x = torch.cuda.is_available()",
        "x = tensor.is_cuda",
        "def use_cuda(): ...",
        "class CudaDevice: ...",
        "class ProcessGroupNCCL: ...",
        "def f(nccl_options): ...",
        "f(cuda=1)",
        "x = 'cuda:0'",
        "x = f'{a}-NVIDIA H100'",
        "x = {'backend': 'cpu:gloo,cuda:nccl'}",
        "os.environ['XLA_FLAGS']",
        "x = 'torch.version.hip'",
        "x = b'amd'",
        "x = 'cuda12'",
        "match x:\n    case 'hpu': pass",
        "global tpu_index",
        "x: 'TpuDevice'",
        "def f():\n    'doc'\n    return 'Gaudi'",
    ],
)
def test_a_vendor_is_seen(code: str) -> None:
    assert vendor_names(code)


@pytest.mark.parametrize(
    "code",
    [
        "'''cuda in a module's docstring'''",
        "def f():\n    'runs on cuda'",
        "class A:\n    x = 1\n    'nccl in a docstring of an attribute'",
        "x = 1  # nccl",
        "chip, ship, hippo, whip = f('chipset', 'relationship', 'membership')",
        "x = 'amd64'",
        "x = 'intelligent neurons, exclamation'",
    ],
)
def test_other_words_are_not_vendors(code: str) -> None:
    assert vendor_names(code) == []


@pytest.mark.parametrize(
    "code",
    [
        "from accelbridge.train.trainer import Trainer",
        "import accelbridge.plugins",
        "from accelbridge import plugins",
        "from accelbridge.parallel import mesh",
        "def f():\n    from accelbridge.plan import resolve",
        "if TYPE_CHECKING:\n    import accelbridge.cli.main as m",
        "from ..agreement import agree",
        "from .. import plugins",
        "import_module('accelbridge.train.build')",
        "from accelbridge.cpu2 import x",
    ],
)
def test_a_private_import_is_seen(code: str) -> None:
    assert private_imports(code, "accelbridge.cpu", "accelbridge.cpu")


@pytest.mark.parametrize(
    "code",
    [
        "import accelbridge",
        "from accelbridge import hookimpl, Backend",
        "from accelbridge.backend import Backend",
        "from accelbridge import ops",
        "from accelbridge.ops.masks import visible_keys",
        "from accelbridge.portable.device import TorchDevice",
        "from accelbridge.parallel.layout import Layout",
        "from accelbridge.parallel import spec",
        "from accelbridge.cpu.device import CpuDevice",
        "from .device import CpuDevice",
        "from . import device",
        "import torch, os.path",
    ],
)
def test_a_public_import_is_fine(code: str) -> None:
    assert private_imports(code, "accelbridge.cpu", "accelbridge.cpu") == []


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("from accelbridge.cpu import attention", True),
        ("from accelbridge import cpu", True),
        ("from ..cpu.device import CpuDevice", True),
        ("import_module('accelbridge.cpu')", True),
        ("import accelbridge_acme.backend", True),
        ("from accelbridge.ops import cpu_count", False),
        ("from accelbridge.backend import Backend", False),
    ],
)
def test_a_backend_in_the_core_is_seen(code: str, seen: bool) -> None:
    assert bool(backend_imports(code, "accelbridge.train")) is seen
