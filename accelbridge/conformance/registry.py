"""What a test of the suite is, and the list of all of them.

    @case("MM-001", "core")
    def exact_integers(t: Bench) -> None:
        \"\"\"An exact-integer bfloat16 product equals float64 bit for bit.\"\"\"
        a, b = t.integers(16, 64), t.integers(64, 8)
        t.equal(t.backend.matmul.matmul(t.put(a), t.put(b)), oracle.matmul(a, b))

Ids are never renamed or reused. A changed assertion raises the revision.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accelbridge.conformance.bench import Bench

LEVELS = ("core", "train", "fp8", "offload", "scale")
"""In the order of their reports. Every level but core needs core; fp8, offload and scale need train too."""
NEEDS: Mapping[str, tuple[str, ...]] = {
    "core": ("core",),
    "train": ("core", "train"),
    "fp8": ("core", "train", "fp8"),
    "offload": ("core", "train", "offload"),
    "scale": ("core", "train", "scale"),
}
Body = Callable[["Bench"], None]


@dataclass(frozen=True)
class Case:
    """One test: an id, when it must pass, and how it is run."""

    id: str
    level: str
    body: Body
    worlds: tuple[int, ...] = (1,)
    """Numbers of ranks at which it runs; it passes if it passes at each."""
    group: bool = True
    """Whether the default process group is opened round it, where there are several ranks."""
    fresh: bool = False
    """Whether its ranks are new processes, which end with it: for tests of faults."""
    exits: bool = False
    """Whether a rank may end during it (killed by the test): its silence is then no crash, but rank 0 must pass."""
    phases: int = 1
    """How often the body runs, each time in new processes, which see the same folder; see :attr:`Bench.phase`."""
    optional: tuple[tuple[str, str, str], ...] = ()
    """Cells (op, dtype, variant) without which it is NOT_SUPPORTED instead of failed."""
    timeout_s: float = 120.0
    revision: int = 1
    spmd: Body | str | None = None
    """Its meaning under the spmd execution model, in one process: another body, or why it holds no question there
    (NOT_SUPPORTED with that reason). None: the same body, in the one process that drives all devices."""

    def body_under(self, execution: str) -> Body:
        """What runs under that execution model."""
        return self.spmd if execution == "spmd" and callable(self.spmd) else self.body

    def asserted(self, execution: str = "eager") -> str:
        """The property asserted: the first paragraph of the body's docstring, on one line."""
        return " ".join((self.body_under(execution).__doc__ or "").strip().split("\n\n")[0].split())


_CASES: dict[str, Case] = {}
_ID = re.compile(r"[A-Z0-9]{2,4}-[0-9]{3}")


def case(
    id: str,
    level: str,
    *,
    worlds: tuple[int, ...] = (1,),
    group: bool = True,
    fresh: bool = False,
    exits: bool = False,
    phases: int = 1,
    optional: tuple[tuple[str, str, str], ...] = (),
    timeout_s: float = 120.0,
    revision: int = 1,
    spmd: Body | str | None = None,
) -> Callable[[Body], Body]:
    """Register the decorated function as a test; see :class:`Case` for the arguments."""

    def register(body: Body) -> Body:
        assert _ID.fullmatch(id), id
        assert id not in _CASES, f"{id} is registered twice"
        assert level in LEVELS, level
        assert body.__doc__, f"{id} does not say which property it asserts"
        assert not callable(spmd) or spmd.__doc__, f"{id} does not say which property it asserts under spmd"
        _CASES[id] = Case(id, level, body, worlds, group, fresh, exits, phases, optional, timeout_s, revision, spmd)
        return body

    return register


@cache
def cases() -> Mapping[str, Case]:
    """All tests by id, in the order of their families. Imports torch."""
    from accelbridge.conformance import suite

    for module in pkgutil.iter_modules(suite.__path__):
        if not module.name.startswith("test_"):  # what pytest collects lies there too
            importlib.import_module(f"{suite.__name__}.{module.name}")
    return dict(sorted(_CASES.items()))


def must_pass(level: str) -> list[str]:
    """Ids that ``level`` itself demands, from the list that ships with the suite."""
    text = files("accelbridge.conformance.spec").joinpath(f"must_pass_{level}.txt").read_text()
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
