"""Lightning Fabric: its DDP strategy, or its ModelParallelStrategy with FSDP2. Its FSDPStrategy refuses a CPU."""

# pyright: reportMissingImports=false
import torch.distributed as dist
from bare_loop import Log, batches, build, build_optimizer, count, loss_sum, set_rate, start
from gate import Gate
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

case, rank, size = start()


def parallelize(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


if case["layout"] == "replicate":
    strategy = DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True)
else:
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=size, tensor_parallel_size=1)
fabric = Fabric(accelerator="cpu", devices=size, strategy=strategy)
fabric.launch()
gate = Gate()
model = fabric.setup_module(build(case), move_to_device=False)
optimizer = fabric.setup_optimizers(build_optimizer(case, model))
log = Log(case, rank)
for step, (tokens, targets, segments) in enumerate(batches(case, rank, size)):
    gate(step)
    total = count(targets)
    dist.all_reduce(total)
    loss = loss_sum(model(tokens, segments), targets) / total
    fabric.backward(loss * size)
    fabric.clip_gradients(model, optimizer, max_norm=case["clip_norm"], error_if_nonfinite=False)
    set_rate(case, optimizer, step)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss.detach())
gate.finish(log.losses)
