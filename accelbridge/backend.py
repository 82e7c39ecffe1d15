"""THE interface: what a vendor states, what it must write, and what already works for it.

Read top to bottom: facts (plain data), the six interfaces (device, collectives, matmul, attention, offload,
execution), and ``Backend``, which ties them together. Everything abstract here has a default in
``accelbridge/portable`` written in plain PyTorch; ``accelbridge/cpu`` is the shortest complete example.

Nothing in this file imports torch: a backend can be described, probed and planned for without it.
Dtypes are therefore spelled as text ("float32", "bfloat16", "float8_e4m3fn"), as ``torch.<dtype>`` names them.
Shape suffixes: B batch, S sequence, H query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

if TYPE_CHECKING:
    import torch
    from pydantic import BaseModel
    from torch import Tensor, nn

    from accelbridge.parallel.layout import Layout
    from accelbridge.parallel.spec import ShardingSpec
    from accelbridge.precision.quantized import QuantizedTensor

API_VERSION = (1, 0)
"""(major, minor) of this interface. An addition raises the minor, a removal the major; the core serves the
current and the previous major."""


# ------------------------------------------------------------------------------------------------ facts (data)


@dataclass(frozen=True)
class Limit:
    """A constraint on one named dimension of a call (``head_dim``, ``k``, ``sequence``, ...)."""

    dim: str
    multiple: int = 1
    minimum: int = 0
    maximum: int | None = None

    def violation(self, shape: Mapping[str, int]) -> str | None:
        """Say how ``shape`` breaks this limit; None if it holds or the dimension isn't in ``shape``."""
        size = shape.get(self.dim)
        if size is None:
            return None
        if size % self.multiple:
            return f"{self.dim}={size} is not a multiple of {self.multiple}"
        if size < self.minimum or (self.maximum is not None and size > self.maximum):
            most = "unlimited" if self.maximum is None else self.maximum
            return f"{self.dim}={size} is outside {self.minimum}..{most}"
        return None


@dataclass(frozen=True)
class Support:
    """Whether something is supported, and if not, why. Never ``None``, ``False`` or a stub."""

    level: Literal["full", "emulated", "unsupported"]
    reason: str = ""
    limits: tuple[Limit, ...] = ()
    lowering: str = ""
    """Name of the declared lowering that makes this work, if it takes one."""

    def __bool__(self) -> bool:
        return self.level != "unsupported"

    def within(self, shape: Mapping[str, int]) -> Support:
        """This support narrowed to a concrete shape."""
        for limit in self.limits:
            if self and (why := limit.violation(shape)):
                return unsupported(why)
        return self


FULL = Support("full")


def unsupported(reason: str) -> Support:
    """Shorthand for ``Support("unsupported", reason)``."""
    return Support("unsupported", reason)


_NO_GRAPHS = unsupported("the backend states no graphs")


@dataclass(frozen=True)
class Lowering:
    """A declared rewrite of a collective that the vendor's library lacks or gets wrong.

    ``name`` selects the code in ``accelbridge.portable.lowerings``; the texts are shown in the plan.
    """

    name: str
    applies: str
    into: str
    reason: str


@dataclass(frozen=True)
class Profile:
    """Environment variables that suit one kind of network or machine: data that lies with the vendor's backend and is
    off unless a recipe names it (``backend.profile``). Each states where its values are from."""

    summary: str
    """Which machines it is for."""
    variables: Mapping[str, str]
    """Set before the vendor's library is loaded; a value that the user has set wins."""
    source: str
    """The document, with its date or version, that states these values."""
    needs: str = ""
    """What must be installed for it."""


@dataclass(frozen=True)
class Chip:
    """What is known of one accelerator model. Unknown stays unknown: no default peak, no default memory."""

    name: str
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """Dense peak in FLOP/s by compute dtype, from the vendor's datasheet."""
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Capabilities:
    """What one chip with one software stack can do; frozen data, made by :meth:`Backend.capabilities`.

    ``table`` is keyed by ``(op, dtype, variant)``; the variant is a reduce op, a scaling or a mask kind, or "".
    """

    chip: Chip
    table: Mapping[tuple[str, str, str], Support]
    layout_axes: tuple[str, ...] = ("dp_replicate", "dp_shard", "tp")
    """Axes of the layout that may be larger than 1."""
    pinned_host_memory: Support = FULL
    deterministic: Support = FULL
    recompute: Support = FULL
    host_activations: Support = FULL
    """Whether what autograd saves may wait on the host (``memory.activations``)."""
    host_parameters: Support = FULL
    """Whether parameters, gradients and moments may lie on the host (``memory.parameters``)."""
    generators: Support = FULL
    """Whether there are ``torch.Generator`` objects of the device, beside its default stream."""
    several_processes: Support = FULL
    """Whether a run may be more than one process."""
    capture: Support = _NO_GRAPHS
    """Whether :meth:`Device.graph` records device work, to be launched whole (``train.capture``)."""
    facts: Mapping[str, str | int] = field(default_factory=dict)
    """What the vendor states of its arithmetic and its library where more than one way is right; the conformance suite
    probes each and compares. A fact that is not stated has its strictest value, named first:

    - ``matmul.accumulator``: "float32" (or wider, rounded to nearest), "float32_toward_zero";
    - ``matmul.float32``: to what operands of float32 products and attention are rounded: "float32", "tf32";
    - ``attention.probabilities``: the dtype to which softmax is rounded before it meets the values; absent: that of
      the query;
    - ``reduce.precision.DTYPE``: the dtype in which a reduction over DTYPE adds: "float32" (or DTYPE where wider);
    - ``reduce.minmax_nan``: "undefined", or "propagates" where a NaN wins MIN and MAX whoever holds it;
    - ``collective.on_mismatch``: what calls that do not fit together end in where they are not checked: "error",
      "abort" (of the process);
    - ``collective.op_mismatch``: ranks with other reduce ops: "error", "undetected";
    - ``p2p.tags``: "ignored", "matched";
    - ``ftz.float32``: subnormals in reductions: "kept", "flushed";
    - ``move.zero_sign``: the sign of a zero that goes from one device to another, of which a compiler may make a sum
      with zeros: "kept", "lost";
    - ``memory.bandwidth``: bytes per second of the device's memory by its datasheet, for floors that measured times are
      held against; nothing else depends on it, and it is not probed;
    - ``rng.stream``: "continuous", or "by_graph" where draws also depend on where the work since the seed was cut into
      graphs;
    - ``fp8.variant``: the e4m3 formats that products take, of "fn", "fnuz" and "ieee", in this order with a space
      between (strictest: "fn");
    - ``fp8.overflow``: what :meth:`Matmul.quantize` can do with a value that is too large: "saturate" (strictest),
      "nonfinite", or "asked" where it does as ``Format.overflow`` says;
    - ``fp8.accumulator_bits``: significand bits that :meth:`Matmul.scaled_mm` adds in (strictest: 24, as float32);
    - ``fp8.promotion``: where that is fewer, terms along K after which a sum moves on to float32 (strictest: 128).
    """
    subnormals: Mapping[str, Literal["kept", "flushed"]] = field(default_factory=dict)
    """What arithmetic does with subnormal numbers, by dtype; "kept" where nothing is stated. Flushed ones count as 0 as
    operands, as results, or both."""
    wrong_references: Mapping[str, str] = field(default_factory=dict)
    """Ops ("dropout"), or ops in one dtype ("linear bfloat16"), whose portable reference gives wrong results here, and
    why: no plan takes it."""
    replaced: tuple[str, ...] = ()
    """Public functions of torch, by dotted name ("torch.compile"), which the vendor's own package replaces when it is
    loaded, whoever loads it. A backend replaces none: the conformance suite holds any other against it."""
    fallbacks: tuple[str, ...] = ()
    """Ops, as torch's dispatcher names them ("aten::sort"), that this backend runs on the host instead of its device.
    The conformance suite takes host work that is not stated here for a silent fallback."""

    def wrong_reference(self, op: str, dtype: str) -> str:
        """Why the portable reference of ``op`` is wrong here in ``dtype``; "" where it is right."""
        return self.wrong_references.get(op) or self.wrong_references.get(f"{op} {dtype}", "")

    def support(self, op: str, dtype: str, variant: str = "", shape: Mapping[str, int] | None = None) -> Support:
        """Look one cell up. A cell that the vendor doesn't state is unsupported, and says so."""
        found = self.table.get((op, dtype, variant))
        if found is None:
            what = f"{op} {dtype}" + (f" {variant}" if variant else "")
            return unsupported(f"the backend states no support for {what} on {self.chip.name}")
        return found.within(shape or {})


@dataclass(frozen=True)
class DeviceInfo:
    """One device as ``accelbridge devices`` lists it. ``memory_bytes`` None: cannot tell without opening it."""

    index: int
    chip: str
    memory_bytes: int | None = None
    path: str = ""
    """Where the operating system shows the device, under /dev or /sys/bus; "" where it doesn't. The conformance suite
    looks there before it calls anything "hardware"."""


@dataclass(frozen=True)
class Probe:
    """The answer to "can this backend run here?". The reason is filled in both cases."""

    available: bool
    reason: str
    devices: tuple[DeviceInfo, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    """Versions that must be equal on all ranks (torch, collective library, compiler, ...)."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What is reported but may differ (driver patch, board, host)."""


@dataclass(frozen=True)
class Request:
    """What a run asks of one op: the inputs of a candidate's ``supports`` predicate."""

    op: str
    dtype: str
    shape: Mapping[str, int] = field(default_factory=dict)
    variant: str = ""
    needs: frozenset[str] = frozenset()
    """Features of this call: for attention "causal", "window", "segments", "softcap", "lse", "gqa"; for rope and swiglu
    "compiled" where torch.compile sees what surrounds them; for adamw "found_inf"."""


@dataclass(frozen=True)
class Implementation:
    """One candidate for an op. ``load`` imports and returns the callable; it runs once, when the plan is bound."""

    op: str
    name: str
    supports: Callable[[Request], Support]
    load: Callable[[], Callable[..., Any]]
    deterministic: bool = True
    evidence: str = "claimed"
    """"claimed" until a conformance report shows the cell; see docs/architecture.md."""
    launches: tuple[str, ...] = ()
    """What is seen when it really runs: ops as torch's dispatcher names them below autograd ("aten::mm", or the name
    of a custom op), of which each call runs at least one. The conformance suite looks for them, so that another
    implementation cannot pass for this one; nothing stated: it doesn't look."""


@dataclass(frozen=True)
class Mask:
    """An attention mask as data. ``segments_BS`` holds document ids: a position sees only its own document."""

    causal: bool = True
    window: int | None = None
    """Sliding window: a query sees itself and at most ``window - 1`` positions before it (needs ``causal``)."""
    segments_BS: Tensor | None = None


@dataclass(frozen=True)
class Format:
    """A number format as data. ``nan`` says how NaN is encoded, ``overflow`` what a too large value becomes."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    nan: Literal["ieee", "all_ones", "negative_zero", "none"]
    overflow: Literal["saturate", "inf", "nan"]
    signed: bool = True
    """Whether the first bit is a sign; formats of scales have none."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of a run: of arithmetic, of gradient reduction, and of the parameters the optimizer owns."""

    compute: str = "float32"
    reduce: str = "float32"
    params: str = "float32"


class Gradients(NamedTuple):
    """What :meth:`Execution.clip_grad_norm` saw before it clipped. All tensors stay on the device."""

    norm: Tensor
    """float32 scalar: the global 2-norm, equal on all ranks."""
    loss: Tensor
    """float32 scalar: 0, or NaN on all ranks where the loss of one is not finite."""
    parameters: Sequence[nn.Parameter]
    """Those that have a gradient, in the model's order."""
    norms: Tensor
    """float32 [parameters]: 2-norm of what this process holds of each gradient."""


@dataclass(frozen=True)
class Traffic:
    """The collectives of one kind in one step of one device."""

    op: str
    """As in the capability table ("all_gather", ...), or what the vendor calls it where we have no name."""
    count: int
    bytes: int
    """Sum over them of the larger of what goes in and what comes out, on one device; not what the wire carries."""


@dataclass(frozen=True)
class Compiled:
    """A whole training step as a vendor's compiler made it for devices that are not here: compiled, not run.

    All figures are the compiler's, per device."""

    chip: str
    devices: int
    fits: bool
    memory: Mapping[str, int]
    """Bytes: "parameters", "optimizer", "batch", "temporaries" (gradients and activations among them), "results" (what
    does not overwrite an argument), "code", and their "total"; of a step that does not fit perhaps the total alone."""
    capacity: int | None = None
    """Bytes that the device has, from the compiler or else from the vendor's page; None: unknown."""
    flops: float | None = None
    collectives: tuple[Traffic, ...] = ()
    software: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    """What making this took here, by phase."""
    host_bytes: int | None = None
    """Largest resident size of the processes that made it."""
    notes: tuple[str, ...] = ()


class CompileTimeout(Exception):
    """:meth:`Execution.compile_ahead` did not finish within its limit."""


@dataclass(frozen=True)
class World:
    """Where this process stands among the processes of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    run_id: str = "local"
    restart: int = 0


# ------------------------------------------------------------------------------------------------- interfaces


class Graph(ABC):
    """Work of a device that is recorded once and from then on launched whole: the same kernels, on the same addresses,
    with the same numbers of the host."""

    @abstractmethod
    def aside(self) -> AbstractContextManager[None]:
        """Context of work on the stream on which :meth:`record` records, as libraries want it that set themselves up at
        their first call. It begins after all that was queued before, and what is queued afterwards waits for it."""

    @abstractmethod
    def record(self, run: Callable[[], None]) -> None:
        """Call ``run``, whose device work is noted and not done: what it writes has no values before :meth:`replay`.
        Raises RuntimeError where it reads from the device, waits for it, or copies from memory that is not pinned."""

    @abstractmethod
    def replay(self) -> None:
        """Do what was recorded, on what the tensors that it used hold now. Does not wait."""


class Device(ABC):
    """The device of this process: binding, memory, random numbers."""

    type: str
    """``torch.device`` type."""

    @abstractmethod
    def count(self) -> int:
        """Devices that processes on this host can be bound to."""

    @abstractmethod
    def bind(self, world: World) -> torch.device:
        """Select the device of this process and return it. The first call that may create a context."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything queued on the bound device has finished."""

    @abstractmethod
    def memory(self) -> Mapping[str, int | None]:
        """Bytes ``allocated``, ``peak`` and ``total``; None where the device cannot tell."""

    @abstractmethod
    def reset_peak_memory(self) -> None:
        """Start a new peak measurement (no effect where memory cannot be told)."""

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed this process's generators, host and device."""

    @abstractmethod
    def rng_state(self) -> Mapping[str, Tensor]:
        """Generator states as uint8 host tensors by name."""

    @abstractmethod
    def set_rng_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`rng_state` returned."""

    def launches(self) -> int | None:
        """Kernels that this process has launched on the bound device so far, of which only differences are used: the
        conformance suite's proof that the device, and not the host in its place, did the work. None: cannot tell."""
        return None

    def graph(self) -> Graph:
        """A new graph, with nothing recorded, of the bound device. Raises ``Unsupported`` where
        :attr:`Capabilities.capture` says so."""
        from accelbridge.errors import Unsupported

        raise Unsupported(f"asked: a graph of device {self.type}; found: it records none; do: see Capabilities.capture")

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether ``error`` says that memory of this device, or of the host, is used up."""
        # torch's allocator of host memory raises a plain RuntimeError, on POSIX and on Windows with these words
        # (c10/core/impl/alloc_cpu.cpp).
        words = ("can't allocate memory", "not enough memory")
        refused = isinstance(error, RuntimeError) and any(text in str(error) for text in words)
        return refused or isinstance(error, MemoryError)


class Collectives(ABC):
    """How process groups of this vendor are made, and what must be lowered."""

    library: str
    """Name of the collective library, shown in the plan."""

    before_device: ClassVar[bool] = False
    """Whether the default group must be there before the device is bound, and lasts as long as the process: its runtime
    joins others when it starts. :meth:`init` after :meth:`shutdown` then finds it as it was."""

    @abstractmethod
    def environment(self, world: World) -> Mapping[str, str]:
        """Variables the vendor's library wants before it is imported. A value the user has set wins."""

    def launch_environment(self, processes: int) -> Mapping[str, str]:
        """Variables that the ``processes`` of this host must share, such as ports that are free: asked for once, by the
        launcher, before it starts them; each inherits them. Under another launcher they are the user's to set."""
        return {}

    def profiles(self) -> Mapping[str, Profile]:
        """Network profiles by name, from which ``backend.profile`` chooses; none by default."""
        return {}

    def trace(self) -> Sequence[Mapping[str, Any]]:
        """What the vendor's library itself has recorded of this process's collectives, oldest first, shaped like
        :meth:`accelbridge.portable.ring.Entry.describe`; empty where it records nothing.

        Read from another thread while a step hangs, where groups are native and our own ring is therefore empty; it
        must not wait for the device or for another rank."""
        return ()

    @abstractmethod
    def lowerings(self) -> Sequence[Lowering]:
        """The lowerings that this vendor needs; they reach all traffic of the run, however it is issued."""

    @abstractmethod
    def init(self, store: torch.distributed.Store, world: World, timeout_s: float, check: bool) -> None:
        """Create the default process group. ``check``: compare every call across ranks before it runs, and
        raise :class:`~accelbridge.errors.CollectiveMismatch` on all of them where they differ."""

    @abstractmethod
    def control_group(self, timeout_s: float) -> torch.distributed.ProcessGroup:
        """A second group of all ranks over the host's network, for small objects and checkpoints; another
        thread may use it while a step runs. Every rank calls this, after :meth:`init`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Destroy all process groups of this process."""


class Matmul(ABC):
    """Dense products. ``implementations`` are the candidates from which the plan binds one per op."""

    @abstractmethod
    def implementations(self) -> Sequence[Implementation]:
        """Candidates for the op ``linear`` (and later ``scaled_mm``), best first; the portable one is implied."""

    @abstractmethod
    def matmul(self, a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """``a @ b`` for ``a [..., M, K]`` and ``b [..., K, N]``, batches broadcast; differentiable. Accumulated in
        float32 or wider, rounded once to ``out_dtype`` (default: that of ``a``). Operands that don't fit raise
        ``ValueError`` or ``Unsupported``."""

    @abstractmethod
    def quantize(self, x: Tensor, format: Format, scaling: str, scale: Tensor | None = None) -> QuantizedTensor:
        """``x``, a matrix, in ``format`` with scales made as ``scaling`` says: a name of
        :data:`accelbridge.precision.scalings.SCALINGS`. Rounds to nearest, ties to even, once. Raises
        ``Unsupported`` with the reason; cells of the capability table: ``("quantize", format, scaling)``.

        ``scale`` is used as it is instead of being made: float32, one for each block of the scaling, to multiply with
        when dequantizing. It may be an older one, or the largest of several ranks', so that elements overflow, which
        become what ``format.overflow`` says; positive, finite, and a power of two where the scaling's are, which is
        for the caller to see to: reading it would make the host wait."""

    @abstractmethod
    def scaled_mm(
        self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """``a @ b + bias`` of the dequantized matrices, rounded once to ``out_dtype``. Scales may change along K only
        every so many terms: quantize what lies along K in rows and hand ``b`` over as ``quantize(w, ...).t()``.
        Raises ``Unsupported`` with the reason; cells of the capability table: ``("scaled_mm", format, scaling)``,
        with limits on ``m``, ``k``, ``n``. Where the operands' formats or scalings differ, "A x B" names both."""


class Attention(ABC):
    """Scaled dot-product attention, forward and backward, with the mask as data."""

    @abstractmethod
    def implementations(self) -> Sequence[Implementation]:
        """Candidates for the op ``attention``, best first; the portable one is implied."""

    @abstractmethod
    def attention(
        self,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        mask: Mask,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """``softmax(mask(softcap(q k^T * scale))) v`` as ``out_BHSD``, with ``lse_BHS`` (natural logarithm,
        float32) when asked; differentiable through both. ``scale`` defaults to ``D ** -0.5``; a row that sees
        nothing gives 0 and -inf. Arguments that don't fit raise ``ValueError`` or ``Unsupported``."""


class Transfer(ABC):
    """A copy in flight. Source and destination must live until :meth:`wait` has returned."""

    @abstractmethod
    def wait(self) -> Tensor:
        """Block until the copy is done and return the destination."""

    def order(self) -> Tensor:
        """Let what is queued on the device from now on come after the copy, without blocking where the device can;
        return the destination."""
        return self.wait()


class Offload(ABC):
    """Movement of tensors between the device, host memory and files.

    A copy sees all work that was queued on the device before it was started, and none of what is queued after.
    """

    @abstractmethod
    def to_host(self, x: Tensor, out: Tensor | None = None) -> Transfer:
        """Start copying ``x`` to host memory (pinned where the device can)."""

    @abstractmethod
    def to_device(self, x: Tensor, out: Tensor | None = None) -> Transfer:
        """Start copying the host tensor ``x`` to the bound device."""

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory without values, pinned where the device can."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def lane(self) -> Offload:
        """The same copies on a queue of their own: each begins after what was queued on the device before it, and runs
        beside what is queued after. Here the device's own queue, for devices that have no other."""
        return self

    @abstractmethod
    def write(self, path: Path, x: Tensor) -> None:
        """Store the bytes of ``x``; ``path`` appears whole or not at all."""

    @abstractmethod
    def read(self, path: Path, out: Tensor) -> Tensor:
        """Fill ``out`` with the stored bytes; raises ``DataError`` if the file's size or checksum differs."""


HostMemory = Literal["", "pageable", "pinned"]
"""Of which kind, where anything is to lie on the host."""


class Execution(ABC):
    """Who owns what differs between execution models.

    ``eager``: one process per device, process groups, modules see local shapes. ``spmd``: one process sees all
    local devices, modules see global shapes and sharding is annotation. The trainer is written once, on these
    methods; it never asks which of the two it runs on. Process groups are a detail of the eager one.

    Order of calls: ``start``, ``realise``, then per step ``place`` / ``microbatch`` / ``sum`` /
    ``clip_grad_norm`` / ``end_step``; ``any``, ``state`` and ``load_state`` between steps; ``close`` at the end.
    """

    model: ClassVar[str]
    """"eager" or "spmd"."""

    gathers_in: ClassVar[str] = "compute"
    """In which of a run's dtypes sharded parameters are gathered: "compute" or "params"."""

    compiles_shapes: ClassVar[bool] = False
    """Whether each shape of a batch is a program to compile, so that batches should have few."""

    device: torch.device
    """Where the batch lies; known after :meth:`start`."""

    gradients: Gradients | None = None
    """What the last :meth:`clip_grad_norm` saw; None before the first."""

    @abstractmethod
    def devices_per_process(self, devices: int) -> int:
        """How many of a host's ``devices`` one process drives: 1 in eager, all of them in spmd."""

    @abstractmethod
    def start(
        self, store: torch.distributed.Store, world: World, layout: Layout, timeout_s: float, check: bool
    ) -> None:
        """Bind devices, join the other processes and build the mesh. Called once, after the ranks agreed."""

    @abstractmethod
    def close(self) -> None:
        """Leave the groups. Safe to call twice, and after a failure."""

    # ---- data

    @property
    @abstractmethod
    def data_coordinates(self) -> range:
        """The data-parallel coordinates that this process feeds: one in eager, all local ones in spmd."""

    @abstractmethod
    def place(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Host tensors of this process's rows -> what the model's forward takes."""

    # ---- model

    @abstractmethod
    def realise(
        self,
        model: nn.Module,
        spec: ShardingSpec,
        precision: Precision,
        initialise: Callable[..., Tensor],
        finish: Callable[[str, nn.Module], None] | None = None,
        *,
        host: HostMemory = "",
    ) -> nn.Module:
        """Shard ``model`` as ``spec`` and the layout say, and materialise it on the device.

        Parameters on the meta device are filled with ``initialise(name, shape, rows)``, a float32 host tensor of
        rows ``rows`` (a range along dimension 0) of the full parameter; others keep their values.
        ``finish(name, unit)`` is called once per shard unit, in the model's order, after it was split over tensor
        parallel and before it is sharded over data parallel: recomputation and :meth:`compile` come in there.
        With ``host`` this process's shards and their gradients lie in host memory of that kind, and a unit is brought
        to the device, gathered, when it is used.
        """

    @abstractmethod
    def compile(self, unit: nn.Module) -> None:
        """Compile the forward pass of a shard unit, and so its backward, in place; nothing where the device
        compiles whole steps anyway. Names of parameters stay, and hooks of the unit run outside what is compiled.
        What cannot be compiled as one graph raises torch's error when the unit first runs: a silent break would
        cost more than compiling gains."""

    def capture(
        self, model: nn.Module, passes: Callable[[Mapping[str, Tensor]], Tensor]
    ) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """``passes``, the forward and backward pass of one microbatch of ``model`` (tensors on the device by name ->
        the loss, a scalar without gradient), such that it is recorded once and then launched as one graph.

        Gradients add up as they do in ``passes``, and the result holds until the next call. Raises ``Unsupported``
        where the device has no graphs, or what is realised cannot be recorded; the first calls raise ConfigError for
        what ``passes`` must not do: draw from the device's generator, read from the device, or take other shapes."""
        from accelbridge.errors import Unsupported

        raise Unsupported(
            f"asked: capture; found: {self.model} execution records no passes; do: set train.capture: false"
        )

    @abstractmethod
    def evaluation(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context of forward passes without gradients; leaves the model as a training step expects it."""

    # ---- step

    @abstractmethod
    def microbatch(self, model: nn.Module, index: int, count: int) -> AbstractContextManager[None]:
        """Context of microbatch ``index`` of ``count``: inner ones don't communicate where the layout allows."""

    @abstractmethod
    def sum(self, x: Tensor) -> Tensor:
        """Sum over all data-parallel replicas; stays on the device."""

    def read_sums(self, shares: Sequence[Tensor]) -> list[float]:
        """:meth:`sum` of each of ``shares``, scalars, on the host: one reduction, for which the host waits. To be
        overridden where stacking them would be another graph to compile."""
        import torch

        return self.sum(torch.stack(list(shares))).tolist()

    @abstractmethod
    def largest(self, x: Tensor) -> Tensor:
        """The elementwise largest over all processes, of a float32 tensor without NaN, which may be overwritten; stays
        on the device."""

    @abstractmethod
    def any(self, flag: bool) -> bool:
        """Whether any process says so. Waits for all of them, so it belongs between steps."""

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """:meth:`any` for each of ``flags``; to be overridden where one reduction serves them all."""
        return [self.any(flag) for flag in flags]

    @abstractmethod
    def clip_grad_norm(self, model: nn.Module, max_norm: float | None, loss: Tensor | None = None) -> Tensor:
        """Global 2-norm of the gradients (each parameter counted once), on the device; scales them to
        ``max_norm`` where that is not None. Leaves :attr:`gradients` behind.

        ``loss`` is this process's share of the step's loss, a scalar: whether it is finite travels with the norm, so
        that all ranks know it of all without a collective more."""

    @abstractmethod
    def scalar(self, value: float) -> float | Tensor:
        """A number that changes every step, such as the learning rate, in the form that an optimizer takes it here:
        where a step is one graph, a tensor on the device, so that the graph does not change."""

    @abstractmethod
    def end_step(self, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """End of a step: lazy devices cut and launch their graph here. Returns ``values`` (tensors or plain numbers)
        in a form that later steps leave alone and that adds nothing to their graphs."""

    # ---- state

    @abstractmethod
    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Model and optimizer state by full parameter name, as tensors that carry their own sharding, so that
        torch's distributed checkpoint can write them and any other layout read them."""

    @abstractmethod
    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Put back what a dict shaped like :meth:`state` now holds."""

    @property
    @abstractmethod
    def control_group(self) -> torch.distributed.ProcessGroup | None:
        """A group over the host's network for small objects and checkpoints, usable from a second thread while
        the step runs; None where one process is all there is."""

    # ---- ahead of time

    @abstractmethod
    def compile_ahead(
        self, target: str, step: Callable[[Execution], None], seconds: float = 600.0
    ) -> Compiled | Support:
        """Compile a whole step for an absent ``target``, whose devices :meth:`Backend.absent` describes;
        unsupported(reason) where the vendor cannot, or where what it takes is not installed.

        ``step(execution)`` calls :meth:`start`, :meth:`realise` of a model on the meta device, and then the methods of
        one whole step, on the execution that it is given: one that records, perhaps in another process, for which
        ``step`` can be pickled. What ``end_step`` is given before the first :meth:`microbatch` is set-up, not the step.
        No memory may be taken for parameters. Raises CompileTimeout after ``seconds``, with no process left behind.
        """


# ---------------------------------------------------------------------------------------------------- backend


class Backend(ABC):
    """One vendor. A class is discovered and probed; an instance, with validated options, runs one process."""

    # ---- facts: a vendor states these
    name: ClassVar[str]
    """The entry-point name, which users write."""
    api_version: ClassVar[tuple[int, int]]
    """The version of this file that the backend was written against; a plugin writes the literal, e.g. (1, 0)."""
    device_type: ClassVar[str]
    """``torch.device`` type."""
    process_group: ClassVar[str]
    """torch.distributed backend, one name or one per device type: "gloo", "cpu:gloo,acme:acmeccl"."""
    accelerator: ClassVar[bool] = True
    """Automatic choice prefers an available accelerator; two available ones are an error that names both."""
    hidden_by: ClassVar[Mapping[str, str]] = {}
    """Environment variables, with values, under which a new process sees no device of this vendor; empty where devices
    cannot be hidden. The conformance suite sets them to see how their absence is reported."""
    chips: ClassVar[Mapping[str, str]] = {}
    """Chips that :meth:`assume` knows: what users write, in small letters, and what ``probe`` calls them. Empty: it
    takes any name that ``capabilities`` does."""
    versions: ClassVar[tuple[str, ...]] = ("torch",)
    """Names of the software whose versions claims and candidates read, which is what :meth:`assume` takes."""
    targets: ClassVar[tuple[str, ...]] = ()
    """First words, besides :attr:`name`, of the targets ``WORD:CHIP:TOPOLOGY`` of :meth:`absent`."""
    options_model: ClassVar[type[BaseModel] | None] = None
    """Pydantic model of ``backend.options``; None: the backend has no options."""

    host: Probe | None = None
    """What :meth:`probe` answered for this run, or :meth:`assume` for one that is only looked at: what candidates may
    depend on. Set by who makes the instance, before anything is asked of it; None where nobody did."""

    def __init__(self, options: BaseModel | None = None) -> None:
        self.options = options

    # ---- a vendor writes these
    @classmethod
    @abstractmethod
    def probe(cls) -> Probe:
        """Can this backend run here? Never raises, creates no context, is safe before a fork, and imports no
        vendor SDK where the operating system can answer."""

    @classmethod
    @abstractmethod
    def capabilities(cls, chip: str, software: Mapping[str, str]) -> Capabilities:
        """Pure function of the chip's name and the software versions, so that any machine can show any plan."""

    @classmethod
    def assume(cls, chip: str, devices: int, software: Mapping[str, str]) -> Probe:
        """What :meth:`probe` would answer on a host with ``devices`` of ``chip``, for a plan that is only looked at:
        the installed torch, and ``software`` over it. To be overridden where a usual installation has more. Raises
        ConfigError for a chip that is not one of :attr:`chips`, and for software that is not one of :attr:`versions`,
        not a version, or a torch that is too old for this package."""
        from importlib.metadata import version

        from accelbridge.errors import ConfigError, did_you_mean
        from accelbridge.software import check_versions

        check_versions(cls.name, cls.versions, software)
        if cls.chips and chip.lower() not in cls.chips:
            raise ConfigError(
                f'chip "{chip}" asked of backend "{cls.name}"; it knows {", ".join(cls.chips)}'
                f"{did_you_mean(chip.lower(), list(cls.chips))}; choose one of them, or another backend"
            )
        name = cls.chips.get(chip.lower(), chip)
        found = tuple(DeviceInfo(index, name) for index in range(devices))
        return Probe(True, f"assumed: {devices} x {name}", found, {"torch": version("torch"), **software})

    @classmethod
    def absent(cls, chip: str, topology: str) -> Probe:
        """What :meth:`probe` would answer of the whole machine that a target names, all its hosts together, for
        :meth:`Execution.compile_ahead`. Raises ConfigError for a chip or a topology that there isn't, Unsupported where
        this vendor compiles for no absent machine, as by default."""
        from accelbridge.errors import Unsupported

        raise Unsupported(
            f"compiling for {chip}:{topology} asked; backend {cls.name} compiles for no machine that is not here; "
            "leave --compile-for out for an estimate by arithmetic"
        )

    def chip(self, probe: Probe) -> tuple[str, str]:
        """The chip that a plan for the devices of ``probe`` is made for, and what to say of that choice ("": nothing).

        Raises BackendError where they are of several models; to be overridden where a vendor can say which of them
        does no more than the others."""
        from accelbridge.errors import BackendError

        names = list(dict.fromkeys(device.chip for device in probe.devices))
        if len(names) > 1:
            raise BackendError(
                f"asked: a plan for the devices of this host; found: {' and '.join(names)}, one plan cannot serve "
                "several models; do: leave devices of one model visible"
            )
        return (names[0] if names else "unknown"), ""

    # ---- these work for any device with an ordinary ``torch.<device_type>`` module; override what differs
    @cached_property
    def collectives(self) -> Collectives:
        from accelbridge.portable.collectives import TorchCollectives

        return TorchCollectives(self.process_group)

    @cached_property
    def device(self) -> Device:
        from accelbridge.portable.device import TorchDevice

        return TorchDevice(self.device_type)

    @cached_property
    def matmul(self) -> Matmul:
        from accelbridge.portable.matmul import PortableMatmul

        return PortableMatmul(self.name)

    @cached_property
    def attention(self) -> Attention:
        from accelbridge.portable.attention import PortableAttention

        return PortableAttention()

    @cached_property
    def offload(self) -> Offload:
        from accelbridge.portable.offload import PortableOffload

        return PortableOffload(self.device_type)

    @cached_property
    def execution(self) -> Execution:
        from accelbridge.portable.execution import EagerExecution

        return EagerExecution(self.device, self.collectives)

    def implementations(self) -> Sequence[Implementation]:
        """Vendor candidates for the ops of ``accelbridge.ops``, best first."""
        return (*self.matmul.implementations(), *self.attention.implementations())
