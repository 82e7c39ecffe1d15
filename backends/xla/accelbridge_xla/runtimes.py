"""Which of the two runtimes serves here: a matter of what is installed, of which nothing is imported.

    torch_xla   PyTorch/XLA, execution model spmd (:mod:`accelbridge_xla.backend`)
    torch_tpu   TorchTPU, execution model eager (:mod:`accelbridge_xla.eager.backend`)

Each is built for some versions of torch, and of released ones (torch_xla 2.9.0, torch_tpu 0.2.0) no torch suits both:
where both are installed, the one that suits the torch beside it serves. ``ACCELBRIDGE_XLA_RUNTIME`` names one instead,
also for a plan that is only looked at, on a machine with neither.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from accelbridge.backend import Backend

VARIABLE = "ACCELBRIDGE_XLA_RUNTIME"
SPMD, EAGER = "torch_xla", "torch_tpu"
RUNTIMES = (SPMD, EAGER)


def version_of(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def installed() -> list[str]:
    """The runtimes that can be imported."""
    return [name for name in RUNTIMES if find_spec(name) is not None]


def chosen() -> str:
    """The runtime that serves, or would if it were installed. Where that is not decided, :func:`refusal` says why."""
    asked = os.environ.get(VARIABLE)
    if asked in RUNTIMES:
        return asked
    here = installed()
    suited = [name for name in here if mismatch(name) is None]
    return (suited or here or [SPMD])[0]


def refusal() -> str | None:
    """Why the chosen runtime cannot serve, as far as installed software tells; None where it can."""
    asked = os.environ.get(VARIABLE)
    if asked and asked not in RUNTIMES:
        return f"{VARIABLE}={asked} is set; the runtimes are {' and '.join(RUNTIMES)}; set one of them, or unset it"
    here = installed()
    if asked and asked not in here:
        return f"{VARIABLE}={asked} is set, but {asked} is not installed; install it, or unset the variable"
    if not here:
        return "neither torch_xla nor torch_tpu is installed"
    if not asked and len([name for name in here if mismatch(name) is None]) > 1:
        torch = version_of("torch")
        return f"torch_xla and torch_tpu are installed, and both suit torch {torch}; set {VARIABLE} to one of them"
    return mismatch(chosen())


def mismatch(runtime: str, software: Mapping[str, str] | None = None) -> str | None:
    """Why the installed torch, or that in ``software``, does not suit ``runtime``; None where it does.

    torch_xla is built against one minor version of torch and fails to load with any other, which its metadata does not
    say; torch_tpu holds a library for each version of torch that its metadata allows.
    """
    found = software or {name: text for name in ("torch", runtime) if (text := version_of(name))}
    torch, own = found.get("torch", ""), found.get(runtime, "")
    if runtime == SPMD:
        suits = _minor(torch) == _minor(own)
        wanted = _minor(own)
    else:
        wanted = _asked_of_torch()
        suits = Requirement(f"torch{wanted}").specifier.contains(torch.partition("+")[0], prereleases=True)
    if suits:
        return None
    return (
        f"{runtime} {own} is built for torch {wanted}, and torch {torch} is installed; use an environment with a torch "
        "that suits"
    )


def _minor(text: str) -> str:
    return ".".join(text.split(".")[:2])


def _asked_of_torch() -> str:
    """What the metadata of torch_tpu asks of torch, such as ">=2.11.0,<=2.15.0"."""
    found = (Requirement(text) for text in requires(EAGER) or ())
    return next((str(each.specifier) for each in found if each.name == "torch"), "")


def backend() -> type[Backend]:
    """The class of the chosen runtime."""
    if chosen() == EAGER:
        from accelbridge_xla.eager.backend import TorchTpuBackend

        return TorchTpuBackend
    from accelbridge_xla.backend import XlaBackend

    return XlaBackend
