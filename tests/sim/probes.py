"""What torch can do with the simulated device, each thing in a function of its own; see ``tests/test_sim.py``.

A probe takes the installed device and raises where something is amiss. They run one after the other in one
process, so each leaves the device as it found it.
"""

from __future__ import annotations

import copy
import ctypes
import io
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from tests.sim.device import Sim, install
from tests.sim.model import Model, Run, adamw
from tests.sim.names import DEVICES, HPU, RENAMED

MODULE_API = (
    *("Event", "Stream", "StreamContext", "stream", "current_stream", "default_stream", "set_stream"),
    *("device", "device_count", "current_device", "set_device", "is_available", "is_initialized", "synchronize"),
    *("manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state"),
    *("empty_cache", "memory_stats", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"),
)
"""What libraries look up in the module of any device."""

Probe = Callable[[Sim], None]
PROBES: dict[str, Probe] = {}


def probe(function: Probe) -> Probe:
    PROBES[function.__name__] = function
    return function


def run_all(probes: Mapping[str, Probe], name: str) -> dict[str, str]:
    """Tracebacks by probe; "" where one passed. Installs the device."""
    sim = install(name)
    found = {}
    for title, function in probes.items():
        try:
            function(sim)
            found[title] = ""
        except BaseException:
            found[title] = traceback.format_exc()
        sim.native.clear_faults()
    return found


def same(ours: Tensor, theirs: Tensor) -> None:
    """Equal bit for bit, wherever the two lie."""
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach().cpu(), rtol=0, atol=0)


def same_on_both(sim: Sim, function: Callable[..., Any], *tensors: Tensor) -> None:
    """``function`` gives the same bits on the host and on the device, and stays there."""
    found, expected = function(*(t.to(sim.name) for t in tensors)), function(*tensors)
    for ours, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert ours.device.type == sim.name
        same(ours, theirs)


def same_gradients(sim: Sim, ours: nn.Module, theirs: nn.Module) -> None:
    """Equal gradients, each on the device."""
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert p.grad.device.type == sim.name
        same(p.grad, q.grad)


# ------------------------------------------------------------------------------------------------------ tensors


@probe
def factories(sim: Sim) -> None:
    for make in (
        lambda **where: torch.zeros(3, **where),
        lambda **where: torch.full((2,), 7, **where),
        lambda **where: torch.arange(5, **where),
        lambda **where: torch.eye(3, **where),
        lambda **where: torch.tensor([1.0, 2.0], **where),
        lambda **where: torch.linspace(0, 1, 5, **where),
        lambda **where: torch.tril(torch.ones(3, 3, **where)),
        lambda **where: torch.empty_strided((2, 2), (1, 2), **where).fill_(3),
    ):
        made = make(device=sim.name)
        assert made.device == sim.device(0)
        same(made, make())


@probe
def mixing_devices_is_refused(sim: Sim) -> None:
    ours, host = torch.ones(3, device=sim.name), torch.ones(3)
    square = torch.ones(3, 3, device=sim.name)
    one = torch.ones(1, 1, 2, 4)
    for mixed in (
        lambda: ours + host,
        lambda: square @ torch.ones(3, 3),
        lambda: torch.cat([ours, host]),
        lambda: torch.stack([host, ours]),
        lambda: F.linear(square, torch.ones(4, 3)),
        lambda: F.embedding(torch.zeros(2, dtype=torch.long), square),
        lambda: torch.where(ours > 0, ours, host),
        lambda: ours.add_(host),
        lambda: torch._foreach_add([ours], [host]),
        lambda: F.cross_entropy(square, torch.zeros(3, dtype=torch.long)),
        lambda: F.scaled_dot_product_attention(one.to(sim.name), one, one),
        lambda: torch.ops.aten.convolution_overrideable(
            one.to(sim.name), one, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
        ),
        lambda: ours.numpy(),
        lambda: host[torch.zeros(1, dtype=torch.long, device=sim.name)],
    ):
        with pytest.raises((RuntimeError, TypeError)):
            mixed()


@probe
def host_scalars_and_indices_are_taken(sim: Sim) -> None:
    ours = torch.ones(3, device=sim.name)
    same(ours * torch.tensor(2.0), torch.full((3,), 2.0))
    ours[torch.tensor([0])] = 5
    assert ours.tolist() == [5, 1, 1]


@probe
def views_and_in_place(sim: Sim) -> None:
    def work(x: Tensor) -> Tensor:
        x = x.clone()
        x[1:, ::2].add_(100)
        x.split([1, 3], 1)[1].mul_(2)
        return torch.cat([x.t().reshape(-1), x.unfold(1, 2, 2).reshape(-1), x.expand(2, 3, 4).sum(0).reshape(-1)])

    same_on_both(sim, work, torch.arange(12.0).view(3, 4))
    ours = torch.arange(12.0, device=sim.name)
    view = ours.view(3, 4)
    assert view._base is ours
    assert view.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()


@probe
def complex_numbers_and_lazy_conjugates(sim: Sim) -> None:
    same_on_both(sim, lambda x: torch.view_as_complex(x).abs(), torch.ones(2, 2))
    pair = torch.complex(torch.ones(2), torch.full((2,), 3.0))
    same(pair.to(sim.name).conj().cpu().resolve_conj(), pair.conj().resolve_conj())
    same(torch._neg_view(pair.to(sim.name)).clone(), torch._neg_view(pair).clone())


@probe
def views_of_lazy_conjugates(sim: Sim) -> None:
    z = torch.view_as_complex(torch.randn(2, 3, 2))
    for view in (
        lambda z: z.conj().imag,
        lambda z: z.conj().real,
        lambda z: z.conj()[1].imag + 0,
        lambda z: z.conj().t().resolve_conj(),
        lambda z: torch._neg_view(z)[:, 1:].resolve_neg(),
        lambda z: torch._neg_view(z.conj()).reshape(-1) * 2,
        lambda z: torch.stack(z.conj().unbind(1)),
    ):
        same_on_both(sim, view, z)
    ours = z.to(sim.name)
    assert ours.conj()[0].is_conj()
    assert ours.conj().imag.is_neg()
    ours.conj().imag.fill_(4)
    same(ours.imag, torch.full((2, 3), -4.0))


@probe
def out_and_resize(sim: Sim) -> None:
    out = torch.empty(0, device=sim.name)
    torch.add(torch.ones(5, device=sim.name), 1, out=out)
    same(out, torch.full((5,), 2.0))
    assert out.resize_(10).shape == (10,)


@probe
def indexing(sim: Sim) -> None:
    x, index = torch.randn(6, 5), torch.tensor([0, 3])
    for function in (
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i),
        lambda x, i: x.index_add(0, i, x[:2]),
        lambda x, i: x.gather(1, i.expand(6, 2)),
        lambda x, i: x.scatter_add(0, i.expand(5, 2).t(), x[:2]),
        lambda x, i: x.topk(2)[0],
        lambda x, i: x.sort()[0],
        lambda x, i: x.cumsum(0),
        lambda x, i: torch.nonzero(x > 0),
        lambda x, i: x[x > 0],
        lambda x, i: torch.unique((x > 0).long()),
    ):
        same_on_both(sim, function, x, index)


@probe
def data_and_swapped_tensors(sim: Sim) -> None:
    parameter = nn.Parameter(torch.ones(3, device=sim.name))
    parameter.data = parameter.data * 2
    same(parameter, torch.full((3,), 2.0))
    torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone() + 1))
    same(parameter, torch.full((3,), 3.0))
    same(parameter.new_zeros(2), torch.zeros(2))
    taken = torch.ones(3, device=sim.name)
    taken.set_(torch.zeros(5, device=sim.name))  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert taken.shape == (5,)


@probe
def storage_resizes(sim: Sim) -> None:
    tensor = torch.ones(64, device=sim.name)
    storage, before = tensor.untyped_storage(), sim.module.memory_allocated()
    storage.resize_(0)
    assert before - sim.module.memory_allocated() >= 256
    storage.resize_(256)
    same(tensor.fill_(3), torch.full((64,), 3.0))
    storage.resize_(512)
    same(tensor, torch.full((64,), 3.0))
    tensor.resize_(2, 3, 4, 5, memory_format=torch.channels_last)
    assert tensor.is_contiguous(memory_format=torch.channels_last)


@probe
def methods_are_generated(sim: Sim) -> None:
    made = torch.ones(2).to(sim.name)
    there = hasattr(made, f"is_{sim.name}")
    assert there == (sim.name != HPU)  # stock torch has none for its own HPU key; the vendor's package adds them
    if there:
        assert getattr(made, f"is_{sim.name}")
        assert getattr(torch.ones(2), sim.name)().device == made.device
        assert getattr(nn.Linear(2, 2), sim.name)().weight.device == made.device


# ------------------------------------------------------------------------------------------------------- memory


@probe
def host_access_faults(sim: Sim) -> None:
    tensor = torch.full((4,), 2.0, device=sim.name)
    child = os.fork()
    if child == 0:
        ctypes.c_float.from_address(tensor.data_ptr()).value  # noqa: B018
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV


@probe
def fresh_memory_is_nan(sim: Sim) -> None:
    used = [torch.full((256,), 5.0, device=sim.name) for _ in range(4)]
    del used
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.empty(256, dtype=dtype, device=sim.name).isnan().all()


@probe
def memory_is_accounted(sim: Sim) -> None:
    before = sim.module.memory_allocated()
    sim.module.reset_peak_memory_stats()
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device=sim.name)
    assert sim.module.memory_allocated() - before == 1 << 20
    del tensor
    assert sim.module.memory_allocated() == before
    assert sim.module.max_memory_allocated() == before + (1 << 20)
    free, total = sim.module.mem_get_info()
    assert total - free == before


@probe
def memory_has_an_end(sim: Sim) -> None:
    with sim.capacity(1 << 24):
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 33554432 bytes"):
            torch.empty(1 << 25, dtype=torch.uint8, device=sim.name)
        same(torch.zeros(4, device=sim.name), torch.zeros(4))
    torch.empty(1 << 25, dtype=torch.uint8, device=sim.name)


@probe
def memory_is_not_shared(sim: Sim) -> None:
    tensor = torch.ones(2, device=sim.name)
    with pytest.raises((RuntimeError, NotImplementedError, pickle.PicklingError)):
        ForkingPickler.dumps(tensor)
    with pytest.raises(TypeError):
        tensor.numpy()


@probe
def host_memory_is_pinned(sim: Sim) -> None:
    assert torch.ones(1000).pin_memory().is_pinned()
    assert torch.empty(10, pin_memory=True).is_pinned()
    assert not torch.ones(3).is_pinned()


@probe
def data_loader_pins(sim: Sim) -> None:
    data = TensorDataset(torch.arange(8.0))
    assert all(batch[0].is_pinned() for batch in DataLoader(data, batch_size=4, pin_memory=True))


@probe
def data_loader_workers_fork(sim: Sim) -> None:
    torch.ones(2, device=sim.name)
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore[reportAttributeAccessIssue]
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=1, multiprocessing_context="fork")
    assert [batch[0].to(sim.name).sum().item() for batch in loader] == [6, 22]


# --------------------------------------------------------------------------------------------- copies and streams


@probe
def upload_is_late(sim: Sim) -> None:
    host = torch.ones(4096).pin_memory()
    ours = host.to(sim.name, non_blocking=True)
    assert sim.native.pending(0) == 1
    host.fill_(9)  # too early
    sim.module.synchronize()
    assert sim.native.pending(0) == 0
    assert ours[0].item() == 9


@probe
def download_is_late(sim: Sim) -> None:
    ours, host = torch.ones(4096, device=sim.name), torch.zeros(4096).pin_memory()
    host.copy_(ours, non_blocking=True)
    assert host[0].item() == 0
    sim.module.synchronize()
    assert host[0].item() == 1


@probe
def pageable_memory_is_copied_at_once(sim: Sim) -> None:
    host = torch.ones(16)
    ours = host.to(sim.name, non_blocking=True)
    host.fill_(9)
    assert ours.sum().item() == 16


@probe
def streams_and_events(sim: Sim) -> None:
    stream, current = torch.Stream(device=sim.name), torch.accelerator.current_stream()
    start, end = (torch.Event(device=sim.name, enable_timing=True) for _ in range(2))
    assert stream != current
    start.record()
    with stream:
        assert torch.accelerator.current_stream() == stream
        end.record()
    current.wait_stream(stream)
    end.synchronize()
    assert end.query()
    assert stream.query()
    assert start.elapsed_time(end) >= 0


@probe
def an_event_orders_what_came_before_it(sim: Sim) -> None:
    first, second = torch.ones(16).pin_memory(), torch.ones(16).pin_memory()
    a = first.to(sim.name, non_blocking=True)
    event = sim.module.Event()
    event.record()
    b = second.to(sim.name, non_blocking=True)
    assert not event.query()
    event.synchronize()
    assert sim.native.pending(0) == 1
    first.fill_(9)
    second.fill_(9)
    assert (a.sum().item(), b.sum().item()) == (16, 16 * 9)


@probe
def a_queued_copy_goes_where_it_was_sent(sim: Sim) -> None:
    parameter, other = nn.Parameter(torch.zeros(16, device=sim.name)), torch.zeros(16, device=sim.name)
    first = parameter.detach()
    with torch.no_grad():
        parameter.copy_(torch.ones(16).pin_memory(), non_blocking=True)
    parameter.data = other
    sim.module.synchronize()
    same(first, torch.ones(16))
    same(other, torch.zeros(16))
    first.copy_(torch.full((16,), 2.0).pin_memory(), non_blocking=True)
    first.untyped_storage().resize_(0)  # the copy is not to be done to memory that was given back
    assert sim.native.pending(0) == 0


@probe
def threads_wait_for_each_others_copies(sim: Sim) -> None:
    """Sixteen threads at once each need what was queued, whichever of them does the copies."""
    with ThreadPoolExecutor(16) as pool:
        for value in range(1, 6):
            ours = [
                torch.full((1 << 16,), float(value)).pin_memory().to(sim.name, non_blocking=True) for _ in range(16)
            ]
            assert sim.native.pending(0) == 16
            sums = list(pool.map(lambda tensor: tensor.sum().item(), reversed(ours)))
            assert sums == [value * float(1 << 16)] * 16


@probe
def several_devices(sim: Sim) -> None:
    ours = torch.ones(2, device=sim.device(1))
    assert ours.device.index == 1
    with torch.accelerator.device_index(1):
        assert torch.ones(2, device=sim.name).device.index == 1
    assert torch.accelerator.current_device_index() == 0
    same(ours.to(sim.device(0)), ours)
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(ours, torch.ones(2, device=sim.device(0)))
    with pytest.raises(RuntimeError, match="ordinal"):
        torch.ones(1, device=f"{sim.name}:17")


@probe
def accelerator_api(sim: Sim) -> None:
    accelerator = torch.accelerator
    found = accelerator.current_accelerator()
    assert found is not None
    assert found.type == sim.name
    assert accelerator.is_available()
    assert accelerator.device_count() == DEVICES
    accelerator.set_device_index(0)
    accelerator.synchronize()
    accelerator.empty_cache()
    accelerator.reset_peak_memory_stats()
    assert accelerator.memory_stats()
    assert accelerator.get_device_capability()


@probe
def device_module_api(sim: Sim) -> None:
    assert [name for name in MODULE_API if not hasattr(sim.module, name)] == []
    assert torch.get_device_module(sim.name) is sim.module
    stream = sim.module.Stream()
    with sim.module.stream(stream):
        assert sim.module.current_stream() == stream
    assert sim.module.current_stream() == sim.module.default_stream()


# ------------------------------------------------------------------------------------------------ random numbers


def seed(sim: Sim, value: int) -> None:
    torch.manual_seed(value)
    sim.module.manual_seed_all(value)


@probe
def generators(sim: Sim) -> None:
    generator = torch.Generator(device=sim.name).manual_seed(5)
    first = torch.randn(4, generator=generator, device=sim.name)
    state = generator.get_state()
    second = torch.randn(4, generator=generator, device=sim.name)
    assert not torch.equal(first.cpu(), second.cpu())
    generator.set_state(state)
    same(torch.randn(4, generator=generator, device=sim.name), second)
    same(torch.randn(4, generator=generator.manual_seed(5), device=sim.name), first)


@probe
def a_host_generator_is_refused(sim: Sim) -> None:
    with pytest.raises(RuntimeError, match="device type for generator"):
        torch.randn(4, generator=torch.Generator(), device=sim.name)


@probe
def random_streams_are_apart(sim: Sim) -> None:
    seed(sim, 3)
    ours, host = torch.randn(4, device=sim.name), torch.randn(4)
    dropped = F.dropout(torch.ones(64, device=sim.name))
    seed(sim, 3)
    same(torch.randn(4), host)
    same(torch.randn(4, device=sim.name), ours)
    same(F.dropout(torch.ones(64, device=sim.name)), dropped)


@probe
def manual_seed_reaches_a_renamed_device_only(sim: Sim) -> None:
    torch.manual_seed(3)
    first = torch.randn(4, device=sim.name)
    torch.manual_seed(3)
    again = torch.equal(torch.randn(4, device=sim.name).cpu(), first.cpu())
    assert again == (sim.name == RENAMED)


@probe
def random_state_is_kept(sim: Sim) -> None:
    with torch.random.fork_rng(devices=[0], device_type=sim.name):
        forked = torch.randn(3, device=sim.name)
    same(torch.randn(3, device=sim.name), forked)
    state = sim.module.get_rng_state()
    assert (state.shape, state.device.type) == ((16,), "cpu")
    drawn = torch.randn(2, device=sim.name)
    sim.module.set_rng_state(state)
    same(torch.randn(2, device=sim.name), drawn)


@probe
def checkpointed_dropout(sim: Sim) -> None:
    from torch.utils.checkpoint import checkpoint

    first = nn.Linear(8, 64)
    model = nn.Sequential(first, nn.Dropout(0.5), nn.Linear(64, 8)).to(sim.name)
    x = torch.randn(4, 8, device=sim.name)
    grads = []
    for reentrant in (None, False, True):
        seed(sim, 7)
        model.zero_grad()
        given = x.clone().requires_grad_()
        out: Any = model(given) if reentrant is None else checkpoint(model, given, use_reentrant=reentrant)
        out.sum().backward()
        assert first.weight.grad is not None
        grads.append(first.weight.grad.clone())
    same(grads[1], grads[0])
    same(grads[2], grads[0])


# ---------------------------------------------------------------------------------------------- models, training


@probe
def modules_move(sim: Sim) -> None:
    host = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    ours = copy.deepcopy(copy.deepcopy(host).to(sim.name))
    assert all(p.device.type == sim.name and type(p) is nn.Parameter for p in ours.parameters())
    x = torch.randn(3, 4)
    same(ours(x.to(sim.name)), host(x))
    for p, q in zip(ours.cpu().parameters(), host.parameters(), strict=True):
        same(p, q)


@probe
def meta_models_materialise(sim: Sim) -> None:
    with torch.device("meta"):
        model = Model()
    assert all(p.device.type == sim.name and p.isnan().all() for p in model.to_empty(device=sim.name).parameters())
    with torch.device(sim.name):
        assert nn.Linear(3, 3).weight.device.type == sim.name


@probe
def gradients(sim: Sim) -> None:
    torch.manual_seed(0)
    host = Model()
    ours, tokens = copy.deepcopy(host).to(sim.name), torch.randint(0, 64, (2, 9))
    for model, x in ((host, tokens), (ours, tokens.to(sim.name))):
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    same_gradients(sim, ours, host)


@probe
def convolutions(sim: Sim) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    host = nn.Sequential(*layers, nn.Linear(128, 5))
    ours, x = copy.deepcopy(host).to(sim.name), torch.randn(2, 3, 8, 8)
    out, expected = ours(x.to(sim.name)), host(x)
    same(out, expected)
    out.sum().backward()
    expected.sum().backward()
    same_gradients(sim, ours, host)


@probe
def attention(sim: Sim) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    x = torch.randn(2, 4, 16, 8)
    same_on_both(sim, lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), x)
    with sdpa_kernel(SDPBackend.MATH):
        same_on_both(sim, lambda x: F.scaled_dot_product_attention(x, x, x), x)


def _trains(**options: Any) -> Probe:
    def train(sim: Sim) -> None:
        assert Run(sim.name, **options).losses() == Run("cpu", **options).losses()

    return train


PROBES |= {
    "adamw_for_loop": _trains(optimizer=adamw(foreach=False)),
    "adamw_foreach": _trains(optimizer=adamw(foreach=True)),
    "adamw_fused": _trains(optimizer=adamw(fused=True)),
    "autocast_training": _trains(autocast=torch.bfloat16),
}


@probe
def adamw_capturable(sim: Sim) -> None:
    losses = Run(sim.name, optimizer=adamw(capturable=True)).losses()
    assert losses == pytest.approx(Run("cpu").losses(), rel=1e-5)


@probe
def adamw_default(sim: Sim) -> None:
    from torch.optim.optimizer import _default_to_fused_or_foreach

    parameters: list[Tensor] = [nn.Parameter(torch.ones(2, device=sim.name))]
    assert _default_to_fused_or_foreach(parameters, False, False) == (False, sim.name == RENAMED)


@probe
def autocast(sim: Sim) -> None:
    x, layer = torch.randn(4, 8), nn.Linear(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x)
    with torch.autocast(sim.name, dtype=torch.bfloat16):
        found = copy.deepcopy(layer).to(sim.name)(x.to(sim.name))
        assert found.softmax(-1).dtype == torch.float32
        assert (found @ found.t()).dtype == torch.bfloat16
    same(found, expected)


@probe
def grad_scaler(sim: Sim) -> None:
    scaler = torch.amp.GradScaler(sim.name)
    parameter = nn.Parameter(torch.ones(2, device=sim.name))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale((parameter * 2).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    same(parameter, torch.full((2,), 0.8))


@probe
def function_transforms(sim: Sim) -> None:
    x = torch.randn(3, 4)
    same_on_both(sim, torch.vmap(lambda row: row.sin().sum()), x)
    same_on_both(sim, torch.func.grad(lambda x: (x**2).sum()), x)


@probe
def compiles_without_inductor(sim: Sim) -> None:
    def compiled(backend: str) -> list[float]:
        def wrap(model: nn.Module) -> nn.Module:
            model.compile(backend=backend)
            return model

        return Run(sim.name, steps=2, wrap=wrap).losses()

    expected = Run("cpu", steps=2).losses()
    assert compiled("eager") == expected
    assert compiled("aot_eager") == expected


@probe
def profiler(sim: Sim) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        (torch.ones(8, device=sim.name) * 2).sum()
    assert len(found.key_averages()) > 2


# ---------------------------------------------------------------------------------------------------- checkpoints


@probe
def saving_and_loading(sim: Sim) -> None:
    run = Run(sim.name, steps=1)
    run.losses()
    file = io.BytesIO()
    torch.save(run.model.state_dict(), file)
    for location in (None, "cpu", sim.name, f"{sim.name}:0", torch.device(sim.name)):
        file.seek(0)
        state = torch.load(file, map_location=location, weights_only=True)
        same(state["head.weight"], run.model.state_dict()["head.weight"])
        assert state["head.weight"].device.type == ("cpu" if location == "cpu" else sim.name)


@probe
def distributed_checkpoint(sim: Sim) -> None:
    import torch.distributed.checkpoint as dcp

    model, other = Model().to(sim.name), Model().to(sim.name)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(model.state_dict(), checkpoint_id=folder, no_dist=True)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    same(other.head.weight, model.head.weight)


@probe
def asynchronous_checkpoint(sim: Sim) -> None:
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model, other = Model().to(sim.name), Model().to(sim.name)
    try:
        with tempfile.TemporaryDirectory() as folder:
            saving: Any = dcp.async_save(model.state_dict(), checkpoint_id=folder)
            saving.result()
            dcp.load(other.state_dict(), checkpoint_id=folder)
    finally:
        dist.destroy_process_group()
    same(other.head.weight, model.head.weight)


# --------------------------------------------------------------------------------------------------------- faults


@probe
def an_op_fails_once(sim: Sim) -> None:
    square = torch.ones(2, 2, device=sim.name)
    with sim.fault("aten::mm", nth=2, message="injected: bad product"):
        torch.mm(square, square)
        with pytest.raises(RuntimeError, match="injected: bad product"):
            torch.mm(square, square)
        torch.mm(square, square)
    with pytest.raises(ValueError, match="would never come"):
        sim.native.set_fault("aten::mm", 0, "", False)


@probe
def a_device_is_lost(sim: Sim) -> None:
    square, event = torch.ones(2, 2, device=sim.name), sim.module.Event()
    event.record()
    with sim.fault("aten::mm", message="injected: lost", sticky=True):
        for dead in (
            lambda: square @ square,
            lambda: square + 1,
            lambda: torch.empty(5, device=sim.name),
            lambda: sim.module.synchronize(),
            event.synchronize,
        ):
            with pytest.raises(RuntimeError, match="injected: lost"):
                dead()
    same(square + 1, torch.full((2, 2), 2.0))


@probe
def an_op_is_missing(sim: Sim) -> None:
    square = torch.ones(2, 2, device=sim.name)
    with sim.without("aten::mm"), pytest.raises(NotImplementedError, match="Could not run 'aten::mm"):
        torch.mm(square, square)
