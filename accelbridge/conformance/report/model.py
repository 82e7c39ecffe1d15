"""The report as data: the schema ``abcr-1``. Unknown keys and values outside the lattice are refused."""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from accelbridge.conformance.status import Status

Sha = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Id = Annotated[str, Field(pattern=r"^[A-Z0-9]{2,4}-[0-9]{3}$")]
Strength = Literal["hardware", "vendor runtime", "simulated"]
Number = float | Literal["nan", "inf", "-inf"]
"""JSON has no NaN and no infinity: they are spelled out."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Suite(_Part):
    """Which suite it was, so that a modified one shows."""

    version: str
    sha256: Sha
    """Of every file of the suite, by path."""
    unmodified: bool | None
    """Whether the files are those that the distribution recorded at installation; None for a source checkout."""
    must_pass: dict[str, Sha]
    """Of the list of mandatory ids, by level."""


class Run(_Part):
    """What was asked."""

    id: str
    mode: Literal["certify", "run"]
    started: datetime
    finished: datetime
    public_seed: int
    fresh_seed: int | None
    filters: list[str]
    """What narrowed the choice of tests; none when certifying."""
    levels: list[Literal["core", "train", "fp8", "offload", "scale"]]


class Subject(_Part):
    """The backend and where it came from."""

    name: str
    distribution: str
    version: str
    api_version: str
    accelerator: bool
    device_type: str
    execution: Literal["eager", "spmd", "unknown"]
    options: dict[str, Any]


class Device(_Part):
    """One device as the backend's probe shows it."""

    index: int
    chip: str
    memory_bytes: int | None
    path: str


class Environment(_Part):
    """Where it ran."""

    chip: str
    devices: list[Device]
    torch: str
    python: str
    system: str
    software: dict[str, str]
    facts: dict[str, str]
    variables: dict[str, str]
    patched: list[str]
    """Functions of torch that the plugin has replaced."""


class Cell(_Part):
    """One cell of the capability table: claimed by the backend, proven by tests."""

    op: str
    dtype: str
    variant: str
    claimed: Literal["full", "emulated", "unsupported"]
    reason: str
    lowering: str
    verdict: Literal["proven", "refuted", "not shown", "not claimed"]
    tests: list[Id]


class Fact(_Part):
    """A fact that the backend states, a probe found, or both."""

    name: str
    stated: str
    probed: str
    agrees: bool | None


class Metric(_Part):
    """The worst value of one measured quantity."""

    name: str
    metric: str
    value: Number
    limit: Number
    margin: Number
    """Share of what is allowed that was used: 0 nothing, 1 all."""
    worst_index: list[int]


class RankResult(_Part):
    """How one rank ended."""

    rank: int
    status: Status
    exit_code: int | None


class WorldResult(_Part):
    """One test at one number of ranks."""

    world: int
    status: Status
    code: str
    message: str
    duration_s: float
    ranks: list[RankResult]
    log: str


class Test(_Part):
    """One test, over all its numbers of ranks."""

    id: Id
    revision: int
    level: str
    property: str
    status: Status
    code: str
    message: str
    duration_s: float
    comparisons: int = Field(ge=0)
    falsified: bool | None
    """Whether it turned red on corrupted outputs; None where it was not tried."""
    on_device: Literal["proven", "unproven"]
    evidence: Strength
    emulated: bool
    metrics: list[Metric]
    worlds: list[WorldResult]
    waiver: str

    @model_validator(mode="after")
    def _compared(self) -> Test:
        if self.status == Status.PASS and self.comparisons < 1:
            raise ValueError(f"{self.id} passed without a comparison")
        return self


class Level(_Part):
    """Whether a level is held, and what stands in the way."""

    held: bool
    required: int
    passed: int
    waived: int
    not_supported: int = 0
    """Of what the level can do without, declared absent; or no question under the backend's execution model."""
    evidence: Strength
    """Of its weakest mandatory test."""
    emulated: bool
    blocking: list[str]
    """"ID STATUS" of each mandatory test that did not pass."""


class Waiver(_Part):
    """An approved exception; see ``spec/waivers.toml``."""

    id: str
    tests: list[Id]
    backend: str
    devices: list[str] = []
    expect: str
    """"STATUS:CODE" with which the test must fail."""
    url: str
    reason: str
    expires: date
    approved_by: str


class Report(_Part):
    """Everything that one run found."""

    format: Literal["abcr-1"]
    headline: str
    suite: Suite
    run: Run
    backend: Subject
    environment: Environment
    levels: dict[str, Level]
    summary: dict[str, int]
    tests: list[Test]
    cells: list[Cell]
    facts: list[Fact]
    waivers: list[Waiver]


def parse(text: str) -> Report:
    """Read a report; pydantic's ValidationError says where it breaks the schema."""
    return Report.model_validate_json(text, strict=False)


def schema() -> dict[str, Any]:
    """JSON Schema of a report (draft 2020-12)."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Report.model_json_schema()}
