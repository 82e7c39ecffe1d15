"""Mistakes against neutrality, each as a piece of a vendor-neutral program would make it, and their repairs.

A mistake must raise: either the device's own refusal, or the assertion that an ordinary test of such code would
make; on the host most of them pass. An entry of :data:`BUGS` passes where exactly that was raised, since any other
error would be a gap of the device and no catch. :data:`CORRECT` are the repairs, which must pass.
"""

from __future__ import annotations

import ctypes
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sim.device import Sim
from tests.sim.names import LIBRARY
from tests.sim.probes import Probe

BUGS: dict[str, Probe] = {}
CORRECT: dict[str, Probe] = {}


def bug(error: type[Exception] | tuple[type[Exception], ...], text: str = "") -> Callable[[Probe], Probe]:
    """A mistake that raises ``error`` with ``text`` in it; an AssertionError without a text is one of this file."""

    def add(function: Probe) -> Probe:
        def is_caught(sim: Sim) -> None:
            with pytest.raises(error, match=text) as caught:
                function(sim)
            assert text or caught.traceback[-1].path == Path(__file__), f"not raised here: {caught.traceback[-1]}"

        BUGS[function.__name__] = is_caught
        return function

    return add


def correct(function: Probe) -> Probe:
    CORRECT[function.__name__] = function
    return function


@contextmanager
def lonely_group() -> Iterator[None]:
    """A group of this process alone, on the device's library."""
    dist.init_process_group(LIBRARY, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------- tensors left on the host


@bug(RuntimeError, "same device")
def mask_made_on_the_host(sim: Sim) -> None:
    torch.mul(torch.randn(2, 4, device=sim.name), torch.ones(2, 4).tril())


@bug(RuntimeError, "same device")
def labels_left_on_the_host(sim: Sim) -> None:
    F.cross_entropy(torch.randn(3, 5, device=sim.name), torch.zeros(3, dtype=torch.long))


@bug(TypeError, "can't convert")
def numpy_of_a_device_tensor(sim: Sim) -> None:
    torch.ones(2, device=sim.name).numpy()


@bug(RuntimeError, "same device")
def optimizer_state_on_the_host(sim: Sim) -> None:
    parameter, momentum = nn.Parameter(torch.ones(3, device=sim.name)), torch.zeros(3)
    parameter.grad = torch.ones(3, device=sim.name)
    momentum.mul_(0.9).add_(parameter.grad, alpha=0.1)


@bug(RuntimeError, "same device")
def loaded_to_the_host_then_mixed(sim: Sim) -> None:
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    torch.add(torch.load(file), torch.ones(2, device=sim.name))


@bug(RuntimeError, "device type cpu")
def metric_reduced_on_the_host(sim: Sim) -> None:
    with lonely_group():
        dist.all_reduce(torch.tensor([1.0]))


@correct
def metric_reduced_on_the_device(sim: Sim) -> None:
    with lonely_group():
        value = torch.tensor([1.0], device=sim.name)
        dist.all_reduce(value)
        assert value.item() == 1


@bug(AssertionError)
def raw_pointer_read_by_the_host(sim: Sim) -> None:
    tensor = torch.full((4,), 2.0, device=sim.name)
    child = os.fork()
    if child == 0:
        ctypes.c_float.from_address(tensor.data_ptr()).value  # noqa: B018
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


# ---------------------------------------------------------------------------------------- one vendor's names


@bug((AssertionError, RuntimeError), "CUDA|NVIDIA")
def synchronizes_another_vendor(sim: Sim) -> None:
    torch.cuda.synchronize()


@bug((AssertionError, RuntimeError), "CUDA|NVIDIA")
def moves_to_another_vendor(sim: Sim) -> None:
    torch.ones(2, device=sim.name).to("cuda")


@bug(AssertionError)
def autocast_for_another_vendor_is_silently_off(sim: Sim) -> None:
    square = torch.ones(2, 2, device=sim.name)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = square @ square
    assert product.dtype == torch.bfloat16


@correct
def autocast_for_the_device(sim: Sim) -> None:
    square = torch.ones(2, 2, device=sim.name)
    with torch.autocast(sim.name, dtype=torch.bfloat16):
        product = square @ square
    assert product.dtype == torch.bfloat16


@bug(AssertionError)
def grad_scaler_for_another_vendor_is_off(sim: Sim) -> None:
    assert torch.amp.GradScaler().is_enabled()


@correct
def grad_scaler_for_the_device(sim: Sim) -> None:
    assert torch.amp.GradScaler(sim.name).is_enabled()


@bug(AssertionError)
def peak_memory_of_another_vendor(sim: Sim) -> None:
    torch.ones(1 << 18, device=sim.name)
    assert torch.cuda.max_memory_allocated() > 0


@correct
def peak_memory_of_the_device(sim: Sim) -> None:
    torch.ones(1 << 18, device=sim.name)
    assert sim.module.max_memory_allocated() >= 1 << 20


@bug(AssertionError)
def two_known_devices_and_no_other(sim: Sim) -> None:
    tensor = torch.ones(2, device=sim.name)
    assert tensor.is_cuda or tensor.device.type == "cpu"


@bug(AssertionError)
def index_assumed_absent(sim: Sim) -> None:
    assert torch.ones(1, device=sim.name).device == torch.device(sim.name)


@bug(RuntimeError, "invalid device ordinal 17")
def wrong_ordinal(sim: Sim) -> None:
    torch.ones(1, device=f"{sim.name}:17")


# ------------------------------------------------------------------------------------------------ random numbers


@bug(RuntimeError, "device type for generator")
def host_generator_for_a_device_op(sim: Sim) -> None:
    torch.randn(3, device=sim.name, generator=torch.Generator().manual_seed(0))


@correct
def device_generator_for_a_device_op(sim: Sim) -> None:
    torch.randn(3, device=sim.name, generator=torch.Generator(sim.name).manual_seed(0))


@bug(AssertionError)
def random_state_without_the_device(sim: Sim) -> None:
    state = torch.get_rng_state()
    drawn = torch.randn(3, device=sim.name)
    torch.set_rng_state(state)
    assert torch.equal(torch.randn(3, device=sim.name).cpu(), drawn.cpu())


@correct
def random_state_of_the_device(sim: Sim) -> None:
    state = sim.module.get_rng_state()
    drawn = torch.randn(3, device=sim.name)
    sim.module.set_rng_state(state)
    assert torch.equal(torch.randn(3, device=sim.name).cpu(), drawn.cpu())


# --------------------------------------------------------------------------------------------- copies and streams


def _uploading(sim: Sim) -> tuple[Tensor, Tensor]:
    host = torch.ones(4096).pin_memory()
    return host, host.to(sim.name, non_blocking=True)


@bug(AssertionError)
def pinned_buffer_reused_too_early(sim: Sim) -> None:
    host, ours = _uploading(sim)
    host.fill_(7)
    assert ours.sum().item() == 4096


@correct
def pinned_buffer_reused_after_the_stream(sim: Sim) -> None:
    host, ours = _uploading(sim)
    sim.module.current_stream().synchronize()
    host.fill_(7)
    assert ours.sum().item() == 4096


@correct
def pinned_buffer_reused_after_an_event(sim: Sim) -> None:
    host, ours = _uploading(sim)
    event = sim.module.Event()
    event.record()
    event.synchronize()
    host.fill_(7)
    assert ours.sum().item() == 4096


def _downloading(sim: Sim) -> Tensor:
    ours, host = torch.full((4096,), 3.0, device=sim.name), torch.zeros(4096).pin_memory()
    return host.copy_(ours, non_blocking=True)


@bug(AssertionError)
def download_read_too_early(sim: Sim) -> None:
    assert _downloading(sim).sum().item() == 3 * 4096


@correct
def download_read_after_a_sync(sim: Sim) -> None:
    host = _downloading(sim)
    sim.module.synchronize()
    assert host.sum().item() == 3 * 4096


def _on_a_side_stream(sim: Sim) -> tuple[Tensor, torch.Stream]:
    host, ours, side = torch.ones(4096).pin_memory(), torch.zeros(4096, device=sim.name), sim.module.Stream()
    with sim.module.stream(side):
        ours.copy_(host, non_blocking=True)
    return ours, side


@bug(AssertionError)
def side_stream_not_waited_for(sim: Sim) -> None:
    ours, _ = _on_a_side_stream(sim)
    assert (ours + 0).sum().item() == 4096


@correct
def side_stream_waited_for(sim: Sim) -> None:
    ours, side = _on_a_side_stream(sim)
    sim.module.current_stream().wait_stream(side)
    assert (ours + 0).sum().item() == 4096


# --------------------------------------------------------------------------------------------------------- memory


def _ten_ones(memory: Tensor) -> None:
    memory[:10] = 1
    assert memory.sum().item() == 10


@bug(AssertionError)
def fresh_memory_taken_for_zeros(sim: Sim) -> None:
    _ten_ones(torch.empty(256, device=sim.name))


@correct
def zeros_asked_for(sim: Sim) -> None:
    _ten_ones(torch.zeros(256, device=sim.name))


def _steps(sim: Sim, kept: list[Tensor] | None) -> None:
    before = sim.module.memory_allocated()
    for _ in range(5):
        made = [torch.ones(1 << 12, device=sim.name)]
        if kept is not None:
            kept += made
        made.clear()
    assert sim.module.memory_allocated() == before


@bug(AssertionError)
def memory_kept_across_steps(sim: Sim) -> None:
    _steps(sim, [])


@correct
def memory_given_back(sim: Sim) -> None:
    _steps(sim, None)


@bug(torch.OutOfMemoryError, "Tried to allocate 4194304 bytes")
def out_of_memory_not_handled(sim: Sim) -> None:
    with sim.capacity(1 << 20):
        torch.empty(1 << 22, dtype=torch.uint8, device=sim.name)
