"""Checks of a recipe against the world, made before a process group, a device or a file of the run exists."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from accelbridge.backend import FULL, Capabilities
from accelbridge.errors import ConfigError, NotSupportedYet, Unsupported
from accelbridge.models.config import ModelConfig
from accelbridge.parallel.layout import Layout
from accelbridge.train.config import MemoryConfig, ParallelConfig, TrainConfig, TrainSection


def check_processes(count: int, capabilities: Capabilities) -> None:
    """Whether the backend runs as ``count`` processes, whoever started them. Raises NotSupportedYet."""
    support = capabilities.several_processes
    if count > 1 and not support:
        raise NotSupportedYet(f"{count} processes asked; {support.reason}; start one process without a launcher")


def resolve_layout(parallel: ParallelConfig, devices: int, capabilities: Capabilities) -> Layout:
    """The layout of ``devices`` devices. Raises NotSupportedYet or ConfigError, naming the axis."""
    _supported_axes(parallel, capabilities)
    asked = {axis: getattr(parallel, axis) for axis in ("pp", "dp_replicate", "cp", "tp")}
    rest = math.prod(asked.values())
    dp_shard = parallel.dp_shard
    if dp_shard == "auto":
        if devices % rest:
            raise ConfigError(
                f"{_product(asked)} asked; the run has {_devices(devices)}, "
                f"not a multiple of {rest}; set other degrees, or take a multiple of {rest} devices (--nproc)"
            )
        dp_shard = devices // rest
    layout = Layout(
        dp_replicate=parallel.dp_replicate,
        dp_shard=dp_shard,
        zero=parallel.zero,
        tp=parallel.tp,
        sequence_parallel=parallel.sequence_parallel,
        cp=parallel.cp,
        pp=parallel.pp,
        ep=parallel.ep,
    )
    if layout.size != devices:
        raise ConfigError(
            f"{_product({**asked, 'dp_shard': dp_shard})} asked, which takes "
            f"{_devices(layout.size)}; the run has {devices}; set parallel.dp_shard: auto, or take "
            f"{layout.size} devices (--nproc {layout.size})"
        )
    return layout


def _product(degrees: Mapping[str, int]) -> str:
    shown = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis.startswith("dp_")}
    return " x ".join(f"parallel.{axis} {degree}" for axis, degree in shown.items())


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count != 1)}"


def _supported_axes(parallel: ParallelConfig, capabilities: Capabilities) -> None:
    for axis in ("cp", "pp", "ep"):
        degree = getattr(parallel, axis)
        if degree > 1:
            raise NotSupportedYet(
                f"parallel.{axis} {degree} asked; {axis} is not supported yet; set parallel.{axis}: 1"
            )
    if parallel.sequence_parallel and parallel.tp == 1:
        raise ConfigError(
            "parallel.sequence_parallel asked; it splits activations over tp, and parallel.tp is 1; "
            "set parallel.tp to 2 or more, or parallel.sequence_parallel: false"
        )
    for axis in ("dp_replicate", "dp_shard", "tp"):
        degree = getattr(parallel, axis)
        if degree != "auto" and degree > 1 and axis not in capabilities.layout_axes:
            raise ConfigError(
                f"parallel.{axis} {degree} asked; the backend realises {', '.join(capabilities.layout_axes)} "
                f"on {capabilities.chip.name}; set parallel.{axis}: 1"
            )


def check_tensor_parallel(layout: Layout, model: ModelConfig | None, seq_len: int | None = None) -> None:
    """Whether tp divides what it splits, as far as it is known. Raises ConfigError naming the setting."""
    tp = layout.tp
    if tp == 1:
        return
    sizes: dict[str, int] = {}
    if model is not None:
        sizes = {
            "model.heads": model.heads,
            "model.kv_heads": model.resolved_kv_heads,
            "model.ffn_dim": model.resolved_ffn_dim,
            "model.vocab_size": model.vocab_size,
        }
    if layout.sequence_parallel and seq_len is not None:
        sizes["train.seq_len"] = seq_len
    for name, size in sizes.items():
        if size % tp:
            raise ConfigError(
                f"parallel.tp {tp} asked; it splits {name} {size}, which is not a multiple of {tp}; "
                f"{_way_out(name, size, tp)}"
            )


def _way_out(name: str, size: int, tp: int) -> str:
    if name.endswith("heads"):
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        return f"set parallel.tp to one of {', '.join(map(str, divisors))}, or change {name}"
    padding = " (ids that no text has are harmless)" if name == "model.vocab_size" else ""
    return f"set {name}: {-(-size // tp) * tp}{padding}, or change parallel.tp"


def accumulation_steps(train: TrainSection, layout: Layout) -> tuple[int, int]:
    """(microbatch size, microbatches per step) of each data-parallel coordinate."""
    ways = layout.data_parallel
    if train.global_batch_size % ways:
        raise ConfigError(
            f"train.global_batch_size {train.global_batch_size} asked; layout {layout.describe()} splits it "
            f"{ways} ways; choose a multiple of {ways}"
        )
    share = train.global_batch_size // ways
    size = train.microbatch_size or share
    if share % size:
        raise ConfigError(
            f"train.microbatch_size {size} asked; each of {ways} data-parallel {'ranks' if ways > 1 else 'rank'} takes "
            f"{share} sequences of train.global_batch_size {train.global_batch_size}, not a multiple of {size}; choose "
            f"a divisor of {share}, or a global batch size that is a multiple of {ways * size}"
        )
    return size, share // size


def check_settings(config: TrainConfig, capabilities: Capabilities) -> None:
    """Settings that need no world: what is not built yet, and what the chip cannot do."""
    _memory(config.memory, capabilities)
    precision = config.precision
    if precision.compute == "float16" and precision.params != "float32":
        raise ConfigError(
            f"precision.params {precision.params} asked; precision.compute is float16, whose updates are lost in less "
            "than float32; set precision.params: float32"
        )
    asked = (("compute", "linear", precision.arithmetic), ("params", "adamw", precision.params))
    for section, op, dtype in asked:
        support = capabilities.support(op, dtype)
        if not support:
            raise ConfigError(
                f'precision.{section} "{dtype}" asked; {support.reason}; choose another dtype, '
                "or see 'accelbridge explain'"
            )
    if config.memory.recompute != "none" and not capabilities.recompute:
        raise ConfigError(f"memory.recompute asked; {capabilities.recompute.reason}; set memory.recompute: none")
    if config.train.deterministic and not capabilities.deterministic:
        raise ConfigError(
            f"train.deterministic asked; {capabilities.deterministic.reason}; set train.deterministic: false"
        )


def check_capture(config: TrainConfig, capabilities: Capabilities, layout: Layout, random: Sequence[str]) -> None:
    """Whether a microbatch's passes can be a graph (``train.capture``), as far as it is known before they run.
    ``random``: classes of modules that draw from generators. Raises ConfigError, or Unsupported of the device."""
    if not config.train.capture:
        return
    support = capabilities.capture
    if not support:
        on = capabilities.chip.name
        raise Unsupported(f"train.capture asked; {support.reason} (on {on}); set train.capture: false")
    why, do = _against_capture(config, layout, random)
    if why:
        raise ConfigError(f"train.capture asked; {why}; {do}, or train.capture: false")


def _against_capture(config: TrainConfig, layout: Layout, random: Sequence[str]) -> tuple[str, str]:
    """What keeps these passes from being a graph, and the setting that would let them; "" where nothing does."""
    precision = config.precision
    if layout.size > 1:
        return (
            f"layout {layout.describe()} has {_devices(layout.size)}: sharded parameters are gathered into memory that "
            "is freed after use, and a graph needs it to stay; collectives in a graph have run on no device here",
            "run on one device",
        )
    if precision.compute == "fp8":
        return "fp8 decides on the host what a step measures and counts", "set precision.compute: bfloat16"
    if not precision.compute == precision.params == precision.reduce:
        return (
            f"precision has compute {precision.compute}, params {precision.params} and reduce {precision.reduce}: with "
            "more than one dtype parameters are cast into memory that is freed after use",
            "set all three to one dtype",
        )
    if config.memory.recompute != "none":
        return "recomputation reads the generators' states in every step", "set memory.recompute: none"
    if config.memory.activations != "device":
        return "activations leave the device in every step", "set memory.activations: device"
    if config.memory.parameters != "device":
        return "parameters lie on the host", "set memory.parameters: device and memory.optimizer: device"
    if config.train.compile:
        return "compiled code checks on the host what it was compiled for, in every step", "set train.compile: false"
    if random:
        return (
            f"{', '.join(random)} draws from the device's generator, of which a graph draws other numbers",
            "use accelbridge.models.Dropout",
        )
    return "", ""


def _memory(memory: MemoryConfig, capabilities: Capabilities) -> None:
    supports = {"activations": capabilities.host_activations, "parameters": capabilities.host_parameters}
    for what in ("activations", "optimizer", "parameters"):
        place = getattr(memory, what)
        if place == "nvme":
            raise NotSupportedYet(f"memory.{what} nvme asked; it is not supported yet; set memory.{what}: host")
        if place == "host" and not (support := supports.get(what, FULL)):
            raise Unsupported(
                f"memory.{what} host asked; {support.reason} (on {capabilities.chip.name}); set memory.{what}: device"
            )
    if memory.optimizer != memory.parameters:
        raise NotSupportedYet(
            f"memory.optimizer {memory.optimizer} asked with memory.parameters {memory.parameters}; updates are "
            f"computed where the parameters lie; set memory.parameters: {memory.optimizer}"
        )
    if memory.host_limit is not None and memory.activations != "host":
        raise ConfigError(
            "memory.host_limit asked; it bounds what waiting activations take on the host, and memory.activations is "
            f"{memory.activations}; set memory.activations: host, or leave host_limit out"
        )
