"""A machine that is not here, as ``--compile-for`` names it: ``WORD:CHIP:TOPOLOGY``.

The word is a backend's name or one of its ``targets``; what chip and topology mean is that backend's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelbridge.assume import selection_of
from accelbridge.backend import Backend, World
from accelbridge.errors import BackendError, ConfigError, did_you_mean
from accelbridge.plugins import Candidate, installed, instantiate, load_named
from accelbridge.train.config import TrainConfig
from accelbridge.train.prepare import Prepared, Target, prepare


@dataclass(frozen=True)
class AbsentMachine:
    """One target."""

    word: str
    chip: str
    topology: str

    @classmethod
    def parse(cls, text: str) -> AbsentMachine:
        """Raises ConfigError for a text of another form."""
        parts = [part.strip() for part in text.split(":")]
        if len(parts) != 3 or not all(parts):
            raise ConfigError(f'--compile-for "{text}" asked; write WORD:CHIP:TOPOLOGY, such as NAME:CHIP:4x4')
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.word}:{self.chip}:{self.topology}"

    def prepare(self, config: TrainConfig) -> Prepared:
        """The run that ``config`` would be there: its layout, batch and plan. Raises what preparing raises."""
        candidate, backend = self._backend()
        probe = backend.absent(self.chip, self.topology)
        with config.places.pointing():
            selection = selection_of(candidate, probe, backend)
            instance = instantiate(selection, config.backend.options)
        chip, note = instance.chip(probe)
        capabilities = backend.capabilities(chip, probe.software)
        target = Target(selection, instance, capabilities, len(probe.devices), note)
        processes = len(probe.devices) // instance.execution.devices_per_process(len(probe.devices))
        return prepare(config, World(size=processes), target=target, writes=False)

    def _backend(self) -> tuple[Candidate, type[Backend]]:
        """The one that claims :attr:`word`. Raises ConfigError, or BackendError where it cannot be loaded."""
        known: dict[str, str] = {}
        broken: list[str] = []
        for name in installed():
            try:
                found = load_named(name)
            except BackendError as error:
                broken.append(str(error))
                continue
            if self.word == name or self.word in found[1].targets:
                return found
            known |= dict.fromkeys((name, *found[1].targets), name)
        failed = f"; not asked: {'; '.join(broken)}" if broken else ""
        raise ConfigError(
            f'--compile-for {self} asked; no installed backend knows "{self.word}"'
            f"{did_you_mean(self.word, list(known))}; known are {', '.join(known)}{failed}; begin with one of them"
        )
