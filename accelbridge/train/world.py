"""Where this process stands, and the CPU store through which processes first meet."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from accelbridge.backend import Collectives, World
from accelbridge.errors import ConfigError
from accelbridge.train.network import apply_profile

if TYPE_CHECKING:
    from torch.distributed import Store

BY_US = "ACCELBRIDGE_LAUNCHED"
"""The launcher's process id, set for ranks that 'accelbridge train' launched: it prints their errors, so they don't."""


def launched() -> bool:
    """Whether a launcher (torchrun, ours, Kubernetes, Ray, srun) has already given this process a rank."""
    return "RANK" in os.environ or _under_srun()


def _under_srun() -> bool:
    """srun sets these for each task of a step; MASTER_ADDR has to come from the batch script."""
    return all(name in os.environ for name in ("SLURM_STEP_ID", "SLURM_PROCID", "MASTER_ADDR"))


def world_from_environment() -> World:
    """Read the launcher's variables; without a launcher, one process is the whole world."""
    if not launched():
        return World()
    names = {
        "rank": ("RANK", "SLURM_PROCID"),
        "size": ("WORLD_SIZE", "SLURM_NTASKS"),
        "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
        "local_size": ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"),
    }
    values = {field: _integer(*candidates) for field, candidates in names.items()}
    rank, size = values["rank"], values["size"]
    local_rank, local_size = values["local_rank"] or 0, values["local_size"] or 1
    if size is None or rank is None:
        have, lack = ("RANK", "WORLD_SIZE") if size is None else ("WORLD_SIZE", "RANK")
        raise ConfigError(f"{have} is set but {lack} is not; start with torchrun or 'accelbridge train --nproc N'")
    _within("RANK", rank, "WORLD_SIZE", size)
    if values["local_size"] is not None:  # some launchers tell the local rank alone
        _within("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_size)
    _meeting_point()
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        run_id=os.environ.get("TORCHELASTIC_RUN_ID") or os.environ.get("SLURM_JOB_ID") or "run",
        restart=(_integer("TORCHELASTIC_RESTART_COUNT") or 0) + (_integer("SLURM_RESTART_COUNT") or 0),
    )


def _integer(*names: str) -> int | None:
    for name in names:
        if name in os.environ:
            try:
                return int(os.environ[name])
            except ValueError:
                raise ConfigError(
                    f'{name}="{os.environ[name]}" is set; it is not an integer; '
                    "start with torchrun or 'accelbridge train --nproc N', or unset it"
                ) from None
    return None


def _within(rank_name: str, rank: int, size_name: str, size: int) -> None:
    if not 0 <= rank < size:
        raise ConfigError(
            f"{rank_name}={rank} and {size_name}={size} are set; ranks are 0 to {size_name} - 1; fix the launcher"
        )


def _meeting_point() -> tuple[str, int]:
    """Host and port of the store."""
    port = _integer("MASTER_PORT")
    if port is None:
        port = 29500  # torchrun's default
    if not 0 < port < 2**16:
        raise ConfigError(f"MASTER_PORT={port} is set; a port is 1 to {2**16 - 1}; choose another port")
    return os.environ.get("MASTER_ADDR") or "127.0.0.1", port


def apply_environment(collectives: Collectives, world: World, profile: str | None = None) -> None:
    """Set what the vendor's library reads before it is imported, and the variables of the network profile that the
    recipe names; a value that the user has set wins."""
    apply_profile(collectives.profiles()[profile] if profile is not None else None)
    for name, value in collectives.environment(world).items():
        os.environ.setdefault(name, value)


def connect(world: World, timeout_s: float) -> Store:
    """Join the store of this run. Raises ConfigError where the address cannot be used."""
    import torch.distributed as dist

    if not launched():
        return dist.HashStore()
    host, port = _meeting_point()
    # An elastic agent already hosts the store; elsewhere rank 0 does.
    hosts = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not hosts:
        _await(host, port, timeout_s)
    elif (host, port) in _HOSTED:
        return _HOSTED[host, port]
    try:
        store = dist.TCPStore(
            host,
            port,
            world.size,
            is_master=hosts,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError) as error:  # DistNetworkError and DistStoreError derive from RuntimeError
        raise ConfigError(
            f"MASTER_ADDR:MASTER_PORT {host}:{port} asked; {_reason(error)}; choose another port"
        ) from error
    if hosts:
        _HOSTED[host, port] = store
    return store


_HOSTED: dict[tuple[str, int], Store] = {}
"""Stores that this process hosts, kept for its life: a second training run of the same ranks meets there again."""


def _await(host: str, port: int, timeout_s: float) -> None:
    """Wait until somebody listens. torch's own client would do so twice as long, and print stacks of C++ meanwhile."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"MASTER_ADDR:MASTER_PORT {host}:{port} asked; nobody answered for {timeout_s:g} s "
                    f"({error.strerror or error}); see whether rank 0 runs there, and that all ranks have its address"
                ) from error
        time.sleep(0.1)


def _reason(error: Exception) -> str:
    text = str(error)
    return "the port is already in use" if "EADDRINUSE" in text or "in use" in text else text.splitlines()[0]
