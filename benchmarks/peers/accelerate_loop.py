"""Hugging Face Accelerate. On a CPU it has DDP; its FSDP silently becomes DDP there."""

# pyright: reportMissingImports=false
import sys

from accelerate import Accelerator, DistributedDataParallelKwargs
from bare_loop import Log, batches, build, build_optimizer, count, loss_sum, set_rate, start
from gate import Gate

case, rank, size = start()
accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
gate = Gate()
model = build(case)
model, optimizer = accelerator.prepare(model, build_optimizer(case, model))
print(f"wrapped as {type(model).__name__}, {accelerator.distributed_type}", file=sys.stderr)
log = Log(case, rank)
for step, (tokens, targets, segments) in enumerate(batches(case, rank, size)):
    gate(step)
    total = accelerator.reduce(count(targets), reduction="sum")
    loss = loss_sum(model(tokens, segments), targets) / total
    accelerator.backward(loss * size)
    accelerator.clip_grad_norm_(model.parameters(), case["clip_norm"])
    set_rate(case, optimizer, step)
    optimizer.step()
    optimizer.zero_grad()
    log(step, loss.detach())
gate.finish(log.losses)
