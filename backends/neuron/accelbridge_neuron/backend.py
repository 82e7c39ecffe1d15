"""The Neuron backend: what it states, and who does what. Everything else is in the modules beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from accelbridge.backend import (
    Attention,
    Backend,
    Capabilities,
    Collectives,
    Device,
    Execution,
    Implementation,
    Offload,
    Probe,
)
from accelbridge.errors import ConfigError
from accelbridge_neuron import facts
from accelbridge_neuron.options import NeuronOptions


class NeuronBackend(Backend):
    """TorchNeuron: one process per logical core, eager, with the vendor's own process group."""

    name: ClassVar[str] = "neuron"
    api_version: ClassVar[tuple[int, int]] = (1, 0)
    device_type: ClassVar[str] = "neuron"
    process_group: ClassVar[str] = "cpu:gloo,neuron:neuron"
    chips: ClassVar[Mapping[str, str]] = facts.CHIPS
    versions: ClassVar[tuple[str, ...]] = ("torch", "torch_neuronx")
    options_model = NeuronOptions

    @classmethod
    def probe(cls) -> Probe:
        from accelbridge_neuron.host import probe

        return probe()

    @classmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        return facts.capabilities(chip, software)

    @classmethod
    def assume(cls, chip: str, devices: int, software: Mapping[str, str]) -> Probe:
        why = next((text for text in facts.REFUSED.values() if text.lower().startswith(f"{chip.lower()} ")), "")
        if why:
            raise ConfigError(f'chip "{chip}" asked of backend "{cls.name}": {why}')
        probe = super().assume(chip, devices, software)
        release = ".".join(probe.software["torch"].split("+")[0].split(".")[:2])
        return replace(probe, software={"torch_neuronx": f"{release}.3.0", **probe.software})

    @cached_property
    def device(self) -> Device:
        from accelbridge_neuron.device import NeuronDevice

        return NeuronDevice()

    @cached_property
    def collectives(self) -> Collectives:
        from accelbridge_neuron.collectives import NeuronCollectives

        return NeuronCollectives(self._options)

    @cached_property
    def attention(self) -> Attention:
        from accelbridge.portable.sdpa import SdpaAttention
        from accelbridge_neuron.attention import candidates

        return SdpaAttention(candidates())

    @cached_property
    def offload(self) -> Offload:
        from accelbridge.portable.offload import PortableOffload

        return PortableOffload(self.device_type, pinned=False)

    @cached_property
    def execution(self) -> Execution:
        from accelbridge_neuron.execution import NeuronExecution

        return NeuronExecution(self.device, self.collectives, self._options.fallback_ops)

    def implementations(self) -> Sequence[Implementation]:
        return (*self.matmul.implementations(), *self.attention.implementations())

    @property
    def _options(self) -> NeuronOptions:
        return self.options if isinstance(self.options, NeuronOptions) else NeuronOptions()
