"""AWS Trainium2 and Trainium3 through TorchNeuron: eager torch on the device "neuron", NKI attention, its own group."""

from __future__ import annotations

from accelbridge.hookspecs import hookimpl


@hookimpl
def accelbridge_backend():
    from accelbridge_neuron.backend import NeuronBackend

    return NeuronBackend
