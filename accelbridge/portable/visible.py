"""Lists of visible devices in environment variables, and hosts whose devices are of several models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accelbridge.backend import DeviceInfo, Probe
from accelbridge.errors import BackendError


@dataclass(frozen=True)
class Visible:
    """What a list leaves visible, as indices into the devices that there were, in the list's order."""

    indices: tuple[int, ...]
    remark: str = ""
    """Why the list names fewer devices than it has parts; "" where it doesn't."""


def select(text: str | None, names: Sequence[str], prefix: str, abbreviated: bool, free: bool = False) -> Visible:
    """The devices that ``text`` leaves visible, where device i is also called ``names[i]``.

    As drivers read such lists (torch follows them in ``torch/cuda/__init__.py``, ``_parse_visible_devices``): absent
    shows all; the first part that is no device ends the list, those before it stay; a device named twice shows none. A
    list whose first part begins with ``prefix`` holds names; they may be cut short where ``abbreviated``. Where lists
    are ``free``, each part is a name or a number of its own, and a device named twice ends the list.
    """
    if text is None:
        return Visible(tuple(range(len(names))))
    parts = [part.strip() for part in text.split(",")]
    if parts == [""]:
        return Visible((), "it is empty")
    named = parts[0].startswith(prefix)
    found: list[int] = []
    for part in parts:
        if free:
            named = part.upper().startswith(prefix)
        index = _by_name(part, names, abbreviated) if named else _by_number(part, len(names), whole=free)
        if index is None:
            rest = "" if len(parts) == 1 else f"; what follows it is not read, {len(found)} before it stay"
            return Visible(tuple(found), f'"{part}" is no device here{rest}')
        if index in found and free:
            return Visible(tuple(found), f'"{part}" is named twice; from there on nothing is read')
        if index in found:
            return Visible((), f'"{part}" is named twice, which leaves none')
        found.append(index)
    return Visible(tuple(found))


def _by_number(part: str, count: int, whole: bool) -> int | None:
    digits = part[: len(part) - len(part.lstrip("0123456789"))]  # as strtoul: "1gpu" is 1
    if not digits or (whole and digits != part):
        return None
    return int(digits) if int(digits) < count else None


def _by_name(part: str, names: Sequence[str], abbreviated: bool) -> int | None:
    wanted = _plain(part)
    matches = [i for i, name in enumerate(names) if _plain(name) == wanted]
    if not matches and abbreviated and wanted:
        matches = [i for i, name in enumerate(names) if _plain(name).startswith(wanted)]
    return matches[0] if len(matches) == 1 else None


def _plain(name: str) -> str:
    return name.lower().replace("-", "")


def summary(devices: Sequence[DeviceInfo]) -> str:
    """``"4 x A, 2 x B"``."""
    counts: dict[str, int] = {}
    for device in devices:
        counts[device.chip] = counts.get(device.chip, 0) + 1
    return ", ".join(f"{count} x {chip}" for chip, count in counts.items())


def one_chip(probe: Probe, mixed: str, order: Callable[[str], int], variable: str) -> tuple[str, str]:
    """The chip that a plan is made for (:meth:`accelbridge.backend.Backend.chip`).

    ``mixed`` is the option of that name, "refuse" or "lowest"; ``order`` numbers its architecture;
    ``variable`` is the one by which devices are hidden. Raises BackendError for several models with "refuse".
    """
    memory = {device.chip: device.memory_bytes or 0 for device in probe.devices}
    names = list(memory)
    if not names:
        return "unknown", ""
    if len(names) == 1:
        return names[0], ""
    listed = summary(probe.devices)
    if mixed != "lowest":
        raise BackendError(
            f"asked: a plan for the devices of this host; found: several models, {listed}; do: leave those of one "
            f"model visible by {variable}, or set backend.options.mixed: lowest to plan for the lowest of them"
        )
    lowest = min(names, key=lambda name: (order(name), memory[name], name))
    return lowest, f"several models here, {listed}: planned for {lowest}, the lowest (backend.options.mixed: lowest)"
