"""The recipe as typed data: one model per section, each beside its owner, all free of torch.

``TrainConfig.load("recipe.yaml", ["train.steps=20"])`` reads a file; ``TrainConfig(train={"steps": 20})`` is the
same thing in Python. Values are checked here one by one; combinations with the world and the data are checked in
``accelbridge.train.check``, before any device or file of a run is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, model_validator

from accelbridge.config import Section, SpelledDtype
from accelbridge.data.config import DataConfig
from accelbridge.memory.config import RecomputeSetting
from accelbridge.models.config import ModelConfig
from accelbridge.train.metrics_config import MetricsConfig
from accelbridge.train.places import Places

Positive = Annotated[int, Field(gt=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Degree = Annotated[int, Field(ge=1, lt=2**31)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86400, allow_inf_nan=False)]
"""At most 30 days: what takes a number of seconds turns far greater ones into an overflow."""
ComputeDtype = Annotated[Literal["float32", "bfloat16", "float16"], SpelledDtype]
WideDtype = Annotated[Literal["float32", "bfloat16"], SpelledDtype]
Place = Literal["device", "host", "nvme"]


class BackendConfig(Section):
    """Which vendor runs this, and what it may do when an op has no implementation there."""

    name: str | None = None
    """Backend by name; absent: the argument, ``ACCELBRIDGE_BACKEND`` or detection decides."""
    profile: str | None = None
    """Network profile, one of those that the backend lists; absent: none is applied."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The backend's own options."""
    ops: dict[str, str] = Field(default_factory=dict)
    """Implementation by op, for example ``{attention: reference}``; one that cannot serve is an error."""
    on_unsupported: Literal["error", "fallback"] = "error"
    """``fallback`` lets an explicit but unusable choice in ``ops`` fall to the next candidate, listed in the plan."""


class ParallelConfig(Section):
    """Degrees of the mesh axes. Their product is the number of devices."""

    dp_replicate: Degree = 1
    """Copies of the model; gradients are summed across them."""
    dp_shard: Degree | Literal["auto"] = "auto"
    """Devices that share one copy; ``auto`` takes what the other axes leave."""
    zero: Annotated[int, Field(ge=1, le=3)] = 3
    """What ``dp_shard`` splits: 1 optimizer state, 2 also gradients, 3 also parameters."""
    tp: Degree = 1
    """Tensor parallel."""
    sequence_parallel: bool = False
    """Split activations along the sequence between tensor-parallel regions."""
    cp: Degree = 1
    """Context parallel."""
    pp: Degree = 1
    """Pipeline parallel."""
    ep: Degree = 1
    """Expert parallel."""
    timeout: Seconds = 300.0
    """Seconds that a collective may take."""
    agreement_timeout: Seconds = 60.0
    """Seconds to wait for every rank to state its plan."""
    check_collectives: bool = False
    """Debugging: compare every collective across ranks before it runs, and name the call sites that differ."""


class PrecisionConfig(Section):
    """Dtypes. The optimizer always works on ``params``; ``compute`` is what matmuls run in."""

    compute: ComputeDtype = "float32"
    reduce: WideDtype = "float32"
    params: WideDtype = "float32"


class NvmeConfig(Section):
    """Where offloaded state may be written."""

    path: str | None = None


class MemoryConfig(Section):
    """What is recomputed, and where state lives."""

    recompute: RecomputeSetting = "none"
    """Activations computed again in the backward pass: none, full (each shard unit), selective (cheap ops with large
    outputs), or chosen: ``{ops: [rms_norm, swiglu]}`` or ``{budget: 200MiB}``."""
    activations: Place = "device"
    optimizer: Place = "device"
    parameters: Place = "device"
    nvme: NvmeConfig = Field(default_factory=NvmeConfig)


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with warm-up and a schedule. Vectors are not decayed."""

    name: Literal["adamw"] = "adamw"
    lr: PositiveNumber = 3e-4
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveNumber = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    clip_norm: PositiveNumber | None = 1.0
    """Largest global gradient norm; null: no clipping."""
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: Count = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of the cosine, as a share of the peak."""


class TrainSection(Section):
    """How long, how much per step, and from which seed."""

    steps: Positive = 1000
    """Optimizer updates in all."""
    seed: Count = 0
    global_batch_size: Positive = 8
    """Sequences per optimizer update, over all devices."""
    microbatch_size: Positive | None = None
    """Sequences per device and forward pass; absent: no accumulation."""
    seq_len: Positive = 128
    """Tokens per sequence."""
    deterministic: bool = False
    """Same layout and backend give the same bits (always so on the CPU)."""
    compile: bool = False
    """Compile each shard unit with torch.compile; the first steps then take long."""
    eval_interval: Count = 0
    """Steps between evaluations on ``data.validation``; 0: only at the end."""


class CheckpointConfig(Section):
    """When state is saved and how much of it is kept."""

    interval: Count = 0
    """Steps between checkpoints; 0: only at the end and on SIGTERM."""
    keep: Positive = 3
    """Newest complete checkpoints to keep."""
    allow_other_data: bool = False
    """Resume although the seed, the batch size, the sequence length or the data differ from the checkpoint's."""
    asynchronous: bool = True
    """Write in the background while the next steps run."""


class OutputConfig(Section):
    """Where a run writes."""

    dir: Annotated[str, Field(min_length=1)] = "runs/default"


class TrainConfig(Section):
    """A recipe."""

    backend: BackendConfig = Field(default_factory=BackendConfig)
    model: ModelConfig | None = None
    data: DataConfig = Field(default_factory=DataConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    train: TrainSection = Field(default_factory=TrainSection)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)
    _places: Places = PrivateAttr(default_factory=Places)

    @property
    def places(self) -> Places:
        """Where each setting was written, if this was read from a recipe."""
        return self._places

    def placed(self, places: Places) -> TrainConfig:
        """This config, which remembers ``places``."""
        self._places = places
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> TrainConfig:
        if self.optimizer.warmup_steps >= self.train.steps:
            raise ValueError(
                f"optimizer.warmup_steps {self.optimizer.warmup_steps} asked; train.steps is {self.train.steps}, and "
                "the warm-up ends before the run; set fewer warm-up steps or more steps"
            )
        return self

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
        """Read a recipe; ``overrides`` are texts ``a.b=c``. Raises ConfigError with file and line."""
        from accelbridge.train.recipe import load_recipe

        return load_recipe(Path(path), overrides)

    @classmethod
    def of(cls, value: TrainConfig | Mapping[str, Any] | str | Path) -> TrainConfig:
        """A config from a config, a mapping or a recipe's path. Raises ConfigError."""
        from accelbridge.train.recipe import validate

        if isinstance(value, TrainConfig):
            return value
        if isinstance(value, (str, Path)):
            return cls.load(value)
        return validate(value)
