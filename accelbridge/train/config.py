"""The recipe as typed data: one model per section, each beside its owner, all free of torch.

``TrainConfig.load("recipe.yaml", ["train.steps=20"])`` reads a file; ``TrainConfig(train={"steps": 20})`` is the
same thing in Python. Values are checked here one by one; combinations with the world and the data are checked in
``accelbridge.train.check``, before any device or file of a run is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, PrivateAttr, Tag, model_validator

from accelbridge.config import Section, SpelledDtype
from accelbridge.data.config import DataConfig
from accelbridge.guards.config import GuardsConfig
from accelbridge.memory.config import RecomputeSetting, size_in_bytes
from accelbridge.models.config import ModelConfig
from accelbridge.precision.config import Fp8Config
from accelbridge.train.checkpoint_config import CheckpointConfig, check_schedule
from accelbridge.train.metrics_config import MetricsConfig
from accelbridge.train.places import Places

Positive = Annotated[int, Field(gt=0, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Degree = Annotated[int, Field(ge=1, lt=2**31)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86400, allow_inf_nan=False)]
"""At most 30 days: what takes a number of seconds turns far greater ones into an overflow."""
ComputeDtype = Annotated[Literal["float32", "bfloat16", "float16", "fp8"], SpelledDtype]
WideDtype = Annotated[Literal["float32", "bfloat16"], SpelledDtype]
Text = Annotated[str, Field(min_length=1)]
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
    """Seconds that a collective may take. The error names the ranks that had arrived, and what the others did."""
    heartbeat_timeout: Seconds = 10.0
    """Seconds without a sign of life after which a rank that others wait for counts as lost."""
    agreement_timeout: Seconds = 60.0
    """Seconds to wait for every rank to state its plan."""
    check_collectives: bool = False
    """Debugging: compare every collective across ranks before it runs, and name the call sites that differ."""


class LossScaleConfig(Section):
    """Dynamic loss scaling (Micikevicius et al., arXiv:1710.03740, section 3.2).

    An update whose gradients overflow is skipped on all ranks and the scale goes down; after ``growth_interval``
    updates in a row without one it goes up.
    """

    initial: PositiveNumber = 65536.0
    """The first scale."""
    growth_interval: Positive = 2000
    """Updates in a row without overflow, after which the scale grows."""
    growth: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    """What the scale is then multiplied by."""
    backoff: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """What it is multiplied by after an overflow."""
    min: PositiveNumber = 1.0
    """It never goes below this."""

    @model_validator(mode="after")
    def _starts_within(self) -> LossScaleConfig:
        if self.initial < self.min:
            raise ValueError(
                f"min {self.min:g} asked; initial is {self.initial:g}, below it; set min to at most initial"
            )
        return self


def _loss_scale_form(value: Any) -> str:
    """Which form of ``precision.loss_scale`` is meant, so that an error is about that one only."""
    if isinstance(value, Mapping | LossScaleConfig):
        return "section"
    return "text" if isinstance(value, str) else "number"


LossScaleChoice = Annotated[
    Annotated[Literal["dynamic"], Tag("text")]
    | Annotated[PositiveNumber, Tag("number")]
    | Annotated[LossScaleConfig, Tag("section")],
    Discriminator(_loss_scale_form),
]


class PrecisionConfig(Section):
    """Dtypes. The optimizer always works on ``params``; ``compute`` is what matmuls run in."""

    compute: ComputeDtype = "float32"
    """float16 needs ``params: float32`` and scales the loss. fp8: products of linear layers have 8-bit operands, as
    ``fp8`` says, and all else is bfloat16."""
    reduce: WideDtype = "float32"
    """Of gradients, on the wire as well."""
    params: WideDtype = "float32"
    """Of the parameters and moments that the optimizer keeps."""
    loss_scale: LossScaleChoice = "dynamic"
    """With compute float16: "dynamic", a section that tunes it, or a number that stays; overflows are skipped."""
    fp8: Fp8Config | None = None
    """With compute fp8: which formats and scales; absent: the defaults."""

    @property
    def arithmetic(self) -> str:
        """The dtype of activations, and of what is not a product in fp8."""
        return "bfloat16" if self.compute == "fp8" else self.compute

    @model_validator(mode="after")
    def _scale_is_used(self) -> PrecisionConfig:
        if self.compute != "float16" and self.loss_scale != "dynamic":
            raise ValueError(
                f"loss_scale asked; compute is {self.compute}, which needs no scaled loss; remove loss_scale, or set "
                "compute: float16"
            )
        if self.compute != "fp8" and self.fp8 is not None:
            raise ValueError(f"fp8 asked; compute is {self.compute}; set compute: fp8, or remove the section fp8")
        return self


class NvmeConfig(Section):
    """Where offloaded state may be written."""

    path: str | None = None


class MemoryConfig(Section):
    """What is recomputed, and where state lives."""

    recompute: RecomputeSetting = "none"
    """Activations computed again in the backward pass: none, full (each shard unit), selective (cheap ops with large
    outputs), or chosen: ``{ops: [rms_norm, swiglu]}`` or ``{budget: 200MiB}``."""
    chunked_loss: bool = False
    """Compute the loss from the last hidden activations, a chunk of the vocabulary at a time, so that logits never
    exist whole; for one more product with the output projection."""
    activations: Place = "device"
    """Where shard units' saved tensors wait for the backward pass."""
    optimizer: Place = "device"
    """Where the moments lie, and where updates are computed."""
    parameters: Place = "device"
    """Where the sharded parameters and their gradients lie between uses; on the host only with the optimizer."""
    host_limit: Annotated[int | None, BeforeValidator(partial(size_in_bytes, what="host_limit"))] = None
    """Most bytes of host memory that waiting activations take, per process; absent: what the host gives."""
    nvme: NvmeConfig = Field(default_factory=NvmeConfig)


class ParameterGroup(Section):
    """Settings of the parameters whose full name matches ``pattern``; of several groups, the first that matches."""

    pattern: Text | list[Text]
    """Shell pattern or patterns of parameter names; ``*`` also matches dots: ``*norm.weight``, ``layers.0.*``."""
    lr_scale: PositiveNumber | None = None
    """What the learning rate is multiplied by; absent: 1."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """For all of the group, vectors included; absent: as for parameters outside groups."""
    frozen: bool = False
    """They keep their values: no gradient, no moments."""

    @property
    def patterns(self) -> list[str]:
        """``pattern`` as a list."""
        return [self.pattern] if isinstance(self.pattern, str) else self.pattern

    @model_validator(mode="after")
    def _does_something(self) -> ParameterGroup:
        tuned = [name for name in ("lr_scale", "weight_decay") if getattr(self, name) is not None]
        if self.frozen and tuned:
            raise ValueError(f"frozen and {tuned[0]} asked; frozen parameters are never updated; remove one of the two")
        if not self.frozen and not tuned:
            raise ValueError(f"pattern {self.pattern} asked without an effect; set lr_scale, weight_decay or frozen")
        if not self.patterns:
            raise ValueError("pattern asked as an empty list; give patterns, or remove the group")
        return self


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, arXiv:1711.05101) with warm-up and a schedule.

    Matrices are decayed and vectors (norms, biases) are not, unless ``groups`` says otherwise.
    """

    name: Literal["adamw"] = "adamw"
    lr: PositiveNumber = 3e-4
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: PositiveNumber = 1e-8
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    clip_norm: PositiveNumber | None = 1.0
    """Largest global gradient norm; null: no clipping."""
    schedule: Literal["cosine", "constant", "wsd"] = "cosine"
    """After the warm-up: down a cosine, constant, or constant and a decay in the last ``decay_steps``."""
    warmup_steps: Count = 0
    """Steps in which the rate rises linearly to ``lr``."""
    decay_steps: Positive | None = None
    """wsd: length of the final decay; required there."""
    decay_shape: Literal["linear", "sqrt"] | None = None
    """wsd: how it decays; absent: sqrt, that is ``1 - sqrt(progress)``."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the end of cosine and wsd, as a share of the peak."""
    groups: list[ParameterGroup] = Field(default_factory=list)
    """Parameters with settings of their own, by name."""

    @model_validator(mode="after")
    def _decay_is_used(self) -> OptimizerConfig:
        if self.schedule == "wsd" and self.decay_steps is None:
            raise ValueError(
                "schedule wsd asked; decay_steps is missing; set decay_steps, a tenth of train.steps for example"
            )
        for name in ("decay_steps", "decay_shape"):
            if self.schedule != "wsd" and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} {getattr(self, name)} asked; schedule is {self.schedule}, which has no such phase; "
                    f"set schedule: wsd, or remove {name}"
                )
        return self


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
    capture: bool = False
    """Record the passes of a microbatch as one graph of the device and launch it whole: for small microbatches, whose
    kernels run shorter than the host takes to launch them. One process, one dtype, nothing recomputed or compiled."""
    eval_interval: Count = 0
    """Steps between evaluations on ``data.validation``; 0: only at the end."""
    max_seconds: Seconds | None = None
    """Seconds from the beginning of fit() until it saves and stops, with exit code 75; absent: no limit."""


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
    guards: GuardsConfig = Field(default_factory=GuardsConfig)
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
    def _phases_fit(self) -> TrainConfig:
        if self.optimizer.warmup_steps >= self.train.steps:
            raise ValueError(
                f"optimizer.warmup_steps {self.optimizer.warmup_steps} asked; train.steps is {self.train.steps}, and "
                "the warm-up ends before the run; set fewer warm-up steps or more steps"
            )
        decay = self.optimizer.decay_steps or 0
        if self.optimizer.warmup_steps + decay > self.train.steps:
            raise ValueError(
                f"optimizer.warmup_steps {self.optimizer.warmup_steps} and optimizer.decay_steps {decay} asked; "
                f"train.steps is {self.train.steps}, less than their sum; set fewer of them or more steps"
            )
        check_schedule(self.checkpoint, self.train)
        return self

    @model_validator(mode="after")
    def _profile_fits(self) -> TrainConfig:
        if (steps := self.metrics.profiled_steps) and steps[-1] > self.train.steps:
            raise ValueError(
                f"metrics.profile {self.metrics.profile} asked; train.steps is {self.train.steps}; give steps "
                "of the run"
            )
        return self

    @model_validator(mode="after")
    def _can_roll_back(self) -> TrainConfig:
        spike, kept = self.guards.spike, self.checkpoint
        if spike is None or spike.action != "rollback":
            return self
        # A spike is seen up to metrics.interval steps later; the newest checkpoint of then may be a step old.
        reach = (kept.keep - 1) * kept.interval
        if reach < spike.window + self.metrics.interval:
            raise ValueError(
                f"guards.spike.action rollback asked; checkpoint.keep {kept.keep} at checkpoint.interval "
                f"{kept.interval} reach back {reach} steps, and a spike is judged by {spike.window} steps "
                f"(guards.spike.window) and seen up to {self.metrics.interval} later (metrics.interval); set them so "
                "that (keep - 1) * checkpoint.interval is at least the sum of the two"
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
