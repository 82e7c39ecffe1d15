"""The pieces in a loop of your own: backend, mesh, sharding, checkpoint. ``python examples/own_loop.py OUT``.

torchrun --nproc-per-node 2 examples/own_loop.py OUT        the same, sharded over two devices
"""

import sys
from pathlib import Path

import torch
from torch import nn

from accelbridge import load_backend
from accelbridge.backend import Precision
from accelbridge.checkpoint.manifest import Manifest
from accelbridge.checkpoint.retention import Retention
from accelbridge.checkpoint.save import Checkpointer
from accelbridge.models.init import Init, initial_values
from accelbridge.parallel.layout import Layout
from accelbridge.parallel.spec import ShardingSpec
from accelbridge.train.world import connect, world_from_environment

backend = load_backend()  # argument > ACCELBRIDGE_BACKEND > detection
execution = backend.execution
world = world_from_environment()
layout = Layout(dp_shard=world.size)
execution.start(connect(world, 60), world, layout, timeout_s=60, check=False)

with torch.device("meta"):  # no process ever holds the whole model
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
model = execution.realise(
    model,
    ShardingSpec(units=("0", "2")),
    Precision(compute="float32"),
    lambda name, shape, rows: initial_values(0, name, shape, rows, Init("normal", 0.1)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
checkpointer = Checkpointer(
    Path(sys.argv[1]), group=execution.control_group, rank=world.rank, retention=Retention(newest=1)
)

for step in range(1, 101):
    generator = torch.Generator().manual_seed(step * world.size + execution.data_coordinates.start)
    x = torch.randn(32, 16, generator=generator)
    batch = execution.place({"x": x, "y": x.sum(1, keepdim=True)})
    with execution.microbatch(model, 0, 1):
        loss = ((model(batch["x"]) - batch["y"]) ** 2).sum() / (32 * layout.data_parallel)
        loss.backward()
    norm = execution.clip_grad_norm(model, max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = execution.sum(loss.detach())
    execution.end_step()
    if step % 50 == 0:
        checkpointer.save(execution.state(model, optimizer), Manifest(step=step, world_size=world.size))
        if world.rank == 0:
            print(f"step {step}  loss {total.item():.4f}  norm {norm.item():.3f}")

checkpointer.close()
execution.close()
