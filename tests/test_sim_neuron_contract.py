"""The Neuron backend against the contract of AWS's SDK, as tests/contracts/neuron.toml has it: each scene passes, and
turns red for the right reason where a mutant of the backend forgets a quirk. Simulated: the SDK is a double."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from accelbridge import Trainer
from accelbridge.backend import FULL, Request, World
from accelbridge.errors import BackendError, ConfigError, Unsupported
from accelbridge.parallel.layout import Layout
from accelbridge.portable.collectives import join
from accelbridge.portable.execution import EagerExecution
from tests import cli
from tests.contracts import facts, neuron
from tests.contracts.facts import OFFICIAL
from tests.ranks import Rank, outcomes, run_ranks
from tests.sim import build

LIMIT = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, store: Path) -> Path:
    build.library()
    made = neuron.site(tmp_path_factory.mktemp("contract"))
    (made / "source").symlink_to(store)
    return made


def world_of(ctx: Rank) -> World:
    return World(ctx.rank, ctx.size, ctx.rank, ctx.size)


def begin(ctx: Rank) -> tuple[Any, torch.device]:
    """A backend, in the order in which the trainer begins."""
    from accelbridge_neuron.backend import NeuronBackend

    ctx.launched()
    backend = NeuronBackend()
    for name, value in backend.collectives.environment(world_of(ctx)).items():
        os.environ.setdefault(name, value)
    return backend, join(backend.device, backend.collectives, ctx.store(), world_of(ctx), LIMIT)


# ------------------------------------------------------------------------------------------------------- scenes


def starts(ctx: Rank, folder: Path) -> None:
    """A group, the local rank's core, statistics as of now; and a second run in the same process."""
    for _ in range(2):
        backend, device = begin(ctx)
        assert device == torch.device("neuron", ctx.rank), device
        x = torch.ones(4, device=device)
        dist.all_reduce(x)
        assert x.tolist() == [float(ctx.size)] * 4
        before = backend.device.memory()["allocated"]
        kept = torch.zeros(1 << 20, device=device)
        grown = backend.device.memory()["allocated"] - before
        assert grown >= kept.nbytes, f"{grown} bytes of {kept.nbytes} are told"
        del kept
        # Used before it ends: gloo lets a rank go while another still connects to it.
        dist.barrier(backend.collectives.control_group(LIMIT))
        backend.collectives.shutdown()


def claims(ctx: Rank, folder: Path) -> None:
    """Every reduction and move that the table claims is taken, and what lowerings are for is lowered."""
    backend, device = begin(ctx)
    for (op, dtype, kind), cell in backend.capabilities("AWS Trainium2", {}).table.items():
        if (
            cell
            and kind != "premul_sum"
            and op in ("all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast", "all_to_all")
        ):
            x = torch.ones(ctx.size * 2, dtype=getattr(torch, dtype), device=device)
            _call(op, x, kind)
    codes = torch.arange(4, dtype=torch.uint8, device=device).view(torch.float8_e5m2)
    gathered = torch.empty(4 * ctx.size, dtype=torch.uint8, device=device).view(torch.float8_e5m2)
    dist.all_gather_into_tensor(gathered, codes)
    dist.all_reduce(torch.ones(0, device=device))
    with pytest.raises(Unsupported, match="library has SUM, AVG, MIN and MAX"):
        dist.all_reduce(torch.ones(2, device=device), op=dist.ReduceOp.PRODUCT)
    sent = [1, 3] if ctx.rank == 0 else [2, 1]
    received = [1, 2] if ctx.rank == 0 else [3, 1]
    mine = torch.full((sum(sent),), float(ctx.rank), device=device)
    out = torch.empty(sum(received), device=device)
    dist.all_to_all_single(out, mine, received, sent)
    assert out.tolist() == [0.0] * received[0] + [1.0] * received[1]


def _call(op: str, x: torch.Tensor, kind: str) -> None:
    reduction: Any = {"op": getattr(dist.ReduceOp, kind.upper())} if kind else {}
    half = x.new_empty(x.shape[0] // dist.get_world_size())
    if op == "all_reduce":
        dist.all_reduce(x, **reduction)
    elif op == "reduce_scatter":
        dist.reduce_scatter_tensor(half, x, **reduction)
    elif op == "reduce":
        dist.reduce(x, 0, **reduction)
    elif op == "all_gather":
        dist.all_gather_into_tensor(x, half.fill_(1))
    elif op == "broadcast":
        dist.broadcast(x, 0)
    else:
        dist.all_to_all_single(torch.empty_like(x), x)


def three(ctx: Rank, folder: Path) -> None:
    """A layout with groups of three is refused before any is made."""
    from accelbridge_neuron.backend import NeuronBackend

    ctx.launched()
    with pytest.raises(ConfigError, match=r"parallel.dp_shard 3; found: groups on Neuron have 1, 2, 4, 8, 16 ranks"):
        NeuronBackend().execution.start(ctx.store(), world_of(ctx), Layout(dp_shard=3), LIMIT, False)


def trains(ctx: Rank, folder: Path, name: str = "run", **options: Any) -> None:
    """A few steps of the trainer, with these options of the backend."""
    neuron.enter(folder)
    ctx.launched()
    sections: dict[str, Any] = {"train": {"steps": 3}, "backend": {"name": "neuron", "options": options}}
    out = folder / (f"{name}-{os.getpid()}" if ctx.size == 1 else f"{name}-{ctx.port}")
    Trainer(cli.recipe(out, folder / "source", **sections)).fit()


def narrows(ctx: Rank, folder: Path) -> None:
    """Nothing that the trainer makes on the device needs more than 32 bits, and batches that do are refused."""
    backend, _ = begin(ctx)
    from torch_neuronx import _types  # pyright: ignore[reportMissingImports]

    with _types.Narrowing():
        trains(ctx, folder)
        for batch, text in (
            (torch.ones(2, dtype=torch.float64), "in torch.float64; found: on Neuron it would be computed in float32"),
            (torch.tensor([1, 1 << 40]), f"with {1 << 40}; found: Neuron narrows int64"),
            (torch.ones(2, dtype=torch.complex64), "is not taken"),
        ):
            execution = backend.execution
            execution.device = torch.device("neuron", ctx.rank)
            with pytest.raises(ConfigError, match=text.replace("(", r"\(")):
                execution.place({"x": batch})
    assert _types.seen["results"] > 1000


def quantizes(ctx: Rank, folder: Path) -> None:
    """No fp8 format is claimed that the chip's compiler refuses."""
    backend, device = begin(ctx)
    from torch_neuronx import _types  # pyright: ignore[reportMissingImports]

    with _types.Narrowing():
        for (op, dtype, _), cell in backend.capabilities("AWS Trainium2", {}).table.items():
            if op == "quantize" and cell:
                torch.ones(2, device=device).to(getattr(torch, dtype))


def compiles(ctx: Rank, folder: Path) -> None:
    """Each shape is a program of its own, and the vendor's compiler makes it."""
    backend, device = begin(ctx)
    import torch_neuronx  # pyright: ignore[reportMissingImports]

    unit = torch.nn.Linear(4, 4).to(device)
    backend.execution.compile(unit)
    for rows in (2, 3, 5, 5):
        unit(torch.ones(rows, 4, device=device))
    found = torch_neuronx.get_dynamo_metrics()["compiles"]
    assert found == 3, f"{found} programs for 3 shapes"


def attends(ctx: Rank, folder: Path) -> None:
    """The kernel that the plan names is the one that runs."""
    backend, device = begin(ctx)
    from torch_neuronx import _attention  # pyright: ignore[reportMissingImports]

    from accelbridge.backend import Mask

    for length, path in ((512, "nki"), (100, "decomposed")):
        q = torch.randn(1, 2, length, 16).to(device)
        request = Request("attention", "float32", {"sequence": length, "head_dim": 16}, needs=frozenset({"causal"}))
        chosen = next(each for each in backend.attention.implementations() if each.supports(request))
        chosen.load()(q, q, q, Mask(causal=True))
        assert (chosen.name == "nki_flash") == (path == "nki"), f"{chosen.name} for {length}"
        assert _attention.paths[-1] == path


def falls_back(ctx: Rank, folder: Path) -> None:
    """An op that runs on the host in a step ends the run, and the error names it; a permitted one does not."""
    neuron.enter(folder)
    from accelbridge_neuron.device import load

    load()
    from torch_neuronx._runtime import RUNTIME  # pyright: ignore[reportMissingImports]

    RUNTIME.unimplemented = {"aten::_log_softmax", "aten::logsumexp", "aten::silu", "aten::mm"}
    with pytest.raises(Unsupported, match=r"found: aten::.* ran on the host instead \(torch_neuronx.get_fallback_ops"):
        trains(ctx, folder)
    trains(ctx, folder, "permitted", fallback_ops=sorted(RUNTIME.unimplemented))


def forks(ctx: Rank, folder: Path) -> None:
    """A forked process is refused, with the vendor's words beneath ours."""
    backend, _ = begin(ctx)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            backend.device.bind(world_of(ctx))
            text = "bound"
        except BaseException:
            text = traceback.format_exc()
        os.write(writing, text.encode()[-4000:])
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reading, 4000).decode()
    assert "do: start processes by spawn. It says: Cannot re-initialize Neuron runtime in forked" in text, text[-600:]


def several_cores(ctx: Rank, folder: Path) -> None:
    """A launcher that gives every rank all cores is told so."""
    os.environ["NEURON_RT_VISIBLE_CORES"] = "0-3"
    with pytest.raises(BackendError, match=r"export to each rank its own core\. It says: Attempted to"):
        begin(ctx)


def too_late(ctx: Rank, folder: Path) -> None:
    """A process that has used the device gets no group."""
    from accelbridge_neuron.device import load

    load()
    torch.ones(1, device="neuron")
    with pytest.raises(BackendError, match=r"touch no neuron tensor before.*It says: Neuron runtime"):
        begin(ctx)


def busy(ctx: Rank, folder: Path) -> None:
    """A core that another process holds."""
    os.environ["NEURON_DOUBLE_BUSY"] = "1"
    with pytest.raises(BackendError, match=r"a core that is in use.*name free cores.*It says: Failed to initialize"):
        begin(ctx)


STRAYS: list[torch.Tensor] = []
"""What a mutant keeps."""
Scene = Callable[..., None]
SCENES: list[tuple[Scene, int]] = [
    (starts, 2),
    (claims, 2),
    (three, 3),
    (trains, 2),
    (narrows, 1),
    (quantizes, 1),
    (compiles, 1),
    (attends, 1),
    (falls_back, 1),
    (forks, 1),
    (several_cores, 1),
    (too_late, 1),
    (busy, 1),
]


def _play(ctx: Rank, folder: Path, scene: Scene, mutant: str = "") -> None:
    neuron.enter(folder)
    if mutant:
        MUTANTS[mutant].forget()
    scene(ctx, folder)


@pytest.mark.parametrize(("scene", "size"), SCENES, ids=[scene.__name__ for scene, _ in SCENES])
def test_the_contract_is_kept(scene: Scene, size: int, folder: Path) -> None:
    run_ranks(_play, size, folder, scene, timeout=120)


# ------------------------------------------------------------------------------------------------------ mutants


class Mutant(NamedTuple):
    """A backend that forgets a quirk: how, in which scene it must be seen, and by what text."""

    forget: Callable[[], None]
    scene: Scene
    size: int
    seen: str


def _patched(module: str, **values: Any) -> Callable[[], None]:
    """Attributes of "package.module:Class" or of a module, replaced."""

    def forget() -> None:
        from importlib import import_module

        name, _, kind = module.partition(":")
        target = import_module(name)
        for attribute, value in values.items():
            setattr(getattr(target, kind) if kind else target, attribute, value)

    return forget


def _set_zero(self: Any, world: World) -> torch.device:
    torch.get_device_module("neuron").set_device(0)
    return torch.device("neuron", 0)


def _stale(self: Any) -> dict[str, Any]:
    module = torch.get_device_module("neuron")
    return {"allocated": module.memory_allocated(), "peak": module.max_memory_allocated(), "total": None}


def _portable_memory(self: Any) -> Any:
    from accelbridge.portable.device import TorchDevice

    return TorchDevice.memory(self)


def _anew(self: Any) -> None:
    dist.destroy_process_group()


def _forget_kept(self: Any, store: Any, world: World, timeout_s: float, check: bool) -> None:
    self._first(store, world, timeout_s, check)


def _claim(**cells: str) -> Callable[[], None]:
    """``op=dtype/kind`` are claimed besides."""

    def forget() -> None:
        from accelbridge_neuron import backend, facts

        true = facts.capabilities

        def wrong(chip: str, software: Any) -> Any:
            found = true(chip, software)
            more = {(op, *what.split("/")): FULL for op, what in cells.items()}
            return replace(found, table={**found.table, **more})

        backend.facts.capabilities = wrong

    return forget


def _without(lowering: str) -> Callable[[], None]:
    def forget() -> None:
        from accelbridge_neuron import collectives

        collectives.LOWERINGS = tuple(each for each in collectives.LOWERINGS if each.name != lowering)

    return forget


def _end_step(issue: Callable[[EagerExecution], None]) -> Callable[[], None]:
    """A step that ends with one collective more."""

    def forget() -> None:
        from accelbridge_neuron.execution import NeuronExecution

        true = NeuronExecution.end_step

        def wrong(self: Any, values: Any = None) -> Any:
            issue(self)
            return true(self, values)

        NeuronExecution.end_step = wrong

    return forget


def _stray(execution: EagerExecution) -> None:
    STRAYS.append(torch.ones(4, device="neuron:0"))
    torch.get_device_module("neuron").synchronize()


def _barrier(execution: EagerExecution) -> None:
    group: Any = dist.new_group(list(range(dist.get_world_size())), backend="neuron")
    dist.barrier(group)


def _send(execution: EagerExecution) -> None:
    other = 1 - dist.get_rank()
    x = torch.ones(2, device=execution.device)
    ops = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, torch.empty_like(x), other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _float64_sum(execution: EagerExecution) -> None:
    torch.ones(2, device=execution.device).double()


def _dynamic(self: Any, unit: Any) -> None:
    unit.forward = torch.compile(unit.forward, backend="neuron", fullgraph=True)


def _inductor(self: Any, unit: Any) -> None:
    unit.forward = torch.compile(unit.forward, backend="aot_eager", fullgraph=True, dynamic=False)


def _place(self: Any, batch: Any) -> Any:
    return EagerExecution.place(self, batch)


def _any_dtype(name: str, tensor: torch.Tensor) -> None:
    return None


class _Unexplained:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _any_length(request: Request) -> Any:
    return FULL


def _unexplained() -> None:
    from accelbridge_neuron import collectives, device

    collectives.explained = device.explained = _Unexplained


_COLLECTIVES, _DEVICE, _EXECUTION = (
    f"accelbridge_neuron.{name}:Neuron{name.capitalize()}" for name in ("collectives", "device", "execution")
)
MUTANTS: dict[str, Mutant] = {
    "the device before the group": Mutant(_patched(_COLLECTIVES, before_device=False), trains, 2, "NEURON-GRP-001"),
    "a group anew": Mutant(_patched(_COLLECTIVES, shutdown=_anew, init=_forget_kept), starts, 2, "should not be"),
    "a second group beside the first": Mutant(_patched(_COLLECTIVES, init=_forget_kept), starts, 2, "one exists"),
    "core 0 for every rank": Mutant(_patched(_DEVICE, bind=_set_zero), starts, 2, "Device index 0 is out of range"),
    "tensors on core 0": Mutant(_end_step(_stray), trains, 2, "NEURON-DEV-004"),
    "memory as last seen": Mutant(_patched(_DEVICE, memory=_stale), starts, 2, "bytes of 4194304 are told"),
    "memory by a name that is not there": Mutant(
        _patched(_DEVICE, memory=_portable_memory), starts, 2, "torch.neuron.mem_get_info was asked for"
    ),
    "PRODUCT claimed": Mutant(_claim(all_reduce="float32/product"), claims, 2, "library has SUM, AVG, MIN and MAX"),
    "PRODUCT let through": Mutant(_without("refused_product"), claims, 2, "AllReduce PRODUCT operation unsupported"),
    "fp8 as it is": Mutant(_without("fp8_bytes"), claims, 2, "NEURON-GRP-004"),
    "uneven splits as they are": Mutant(_without("uneven_all_to_all"), claims, 2, "Only even split sizes are"),
    "groups of any size": Mutant(
        _patched("accelbridge_neuron.execution", check_groups=lambda layout: None), three, 3, "NEURON-GRP-006"
    ),
    "a barrier of some ranks": Mutant(_end_step(_barrier), trains, 2, "Barrier is implemented only for default group"),
    "point to point": Mutant(_end_step(_send), trains, 2, "NEURON-GRP-008"),
    "a sum of nothing": Mutant(_without("nothing"), claims, 2, "cannot have zero size in dimension 0"),
    "float64 in a step": Mutant(_end_step(_float64_sum), narrows, 1, "NEURON-TYP-002"),
    "batches of any dtype": Mutant(
        _patched("accelbridge_neuron.execution", check_dtype=_any_dtype), narrows, 1, "NEURON-TYP-002"
    ),
    "fp8 of Trn3 claimed on Trn2": Mutant(_claim(quantize="float8_e4m3fn/tensor"), quantizes, 1, "NCC_EVRF051"),
    "dynamic shapes": Mutant(_patched(_EXECUTION, compile=_dynamic), compiles, 1, "EMOD025"),
    "another compiler": Mutant(_patched(_EXECUTION, compile=_inductor), compiles, 1, "0 programs for 3 shapes"),
    "NKI for any length": Mutant(
        _patched("accelbridge_neuron.attention", _shapes=_any_length), attends, 1, "nki_flash for 100"
    ),
    "ops on the host unseen": Mutant(
        _patched(_EXECUTION, _check_fallbacks=lambda self: None), falls_back, 1, "DID NOT RAISE"
    ),
    "a fork unexplained": Mutant(_unexplained, forks, 1, "Cannot re-initialize Neuron runtime in forked"),
    "cores of all ranks unexplained": Mutant(_unexplained, several_cores, 1, "Attempted to have more than one device"),
    "a group too late unexplained": Mutant(_unexplained, too_late, 1, "should not be initialized before"),
    "a core in use unexplained": Mutant(_unexplained, busy, 1, "NC_BUSY"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_forgetting_it_is_seen(mutant: str, folder: Path) -> None:
    _, scene, size, text = MUTANTS[mutant]
    found = outcomes(_play, size, folder, scene, mutant, timeout=60)
    said = [f"{outcome.error}: {outcome.message}" for outcome in found if outcome.error]
    assert any(text in each for each in said), said


def test_facts_name_tests_that_are_here() -> None:
    here = {f"test_forgetting_it_is_seen[{name}]" for name in MUTANTS}
    here |= {f"test_the_contract_is_kept[{scene.__name__}]" for scene, _ in SCENES}
    ours = [fact for fact in facts().values() if fact.vendor == "neuron"]
    assert len(ours) > 20
    for fact in ours:
        file, _, test = fact.test.partition("::")
        assert (Path(__file__).parents[1] / file).exists(), fact
        assert test in here or file != f"tests/{Path(__file__).name}", fact
    unsure = {fact.id for fact in ours if fact.certainty not in OFFICIAL}
    assert {"NEURON-GRP-001", "NEURON-GRP-006", "NEURON-GRP-012", "NEURON-ATT-001"} <= unsure


def test_the_probe_imports_neither_torch_nor_the_sdk(folder: Path) -> None:
    code = (
        "import sys; from accelbridge_neuron.host import probe; found = probe(); "
        "print(found.available, len(found.devices), 'torch' in sys.modules, 'torch_neuronx' in sys.modules)"
    )
    env = {**os.environ, **neuron.environment(folder)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.split() == ["True", "4", "False", "False"], done.stdout
