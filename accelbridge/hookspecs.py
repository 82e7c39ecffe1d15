"""The one hook. A vendor's entry-point module implements it and returns its ``Backend`` class.

    from accelbridge import hookimpl

    @hookimpl
    def accelbridge_backend():
        from .backend import AcmeBackend
        return AcmeBackend

Hooks are for discovery only: nothing on the path of a training step goes through pluggy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from accelbridge.backend import Backend

PROJECT = "accelbridge"
ENTRY_POINT_GROUP = "accelbridge.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def accelbridge_backend() -> type[Backend]:
    """Return this plugin's subclass of :class:`accelbridge.Backend`. Must not import the vendor's SDK."""
    raise NotImplementedError  # a specification, never called
