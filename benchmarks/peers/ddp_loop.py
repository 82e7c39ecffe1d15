"""The loop by hand with DistributedDataParallel instead of FSDP2: every rank holds everything."""

# pyright: reportMissingImports=false
import torch.distributed as dist
from bare_loop import Log, batches, build, build_optimizer, count, loss_sum, set_rate, start
from gate import Gate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

case, rank, size = start()
dist.init_process_group("gloo")
gate = Gate()
model = DistributedDataParallel(build(case), gradient_as_bucket_view=True)
optimizer = build_optimizer(case, model)
log = Log(case, rank)
for step, (tokens, targets, segments) in enumerate(batches(case, rank, size)):
    gate(step)
    total = count(targets)
    dist.all_reduce(total)
    loss = loss_sum(model(tokens, segments), targets) / total
    (loss * size).backward()  # DDP takes the mean of the gradients
    nn.utils.clip_grad_norm_(model.parameters(), case["clip_norm"])
    set_rate(case, optimizer, step)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss.detach())
gate.finish(log.losses)
