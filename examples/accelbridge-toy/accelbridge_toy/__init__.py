"""The entry point: the one hook. Nothing of the vendor's SDK is imported here."""

from accelbridge import hookimpl


@hookimpl
def accelbridge_backend():
    from accelbridge_toy.backend import ToyBackend

    return ToyBackend
