"""DeepSpeed: ZeRO 1 to 3, float32 or bfloat16, with torch's fused AdamW, as everybody here has it."""

# pyright: reportMissingImports=false
import deepspeed
import torch.distributed as dist
from bare_loop import Log, batches, build, build_optimizer, count, loss_sum, set_rate, start
from gate import Gate

case, rank, size = start()
bfloat16 = case["compute"] == "bfloat16"
config = {
    "train_batch_size": case["global_batch_size"],
    "train_micro_batch_size_per_gpu": case["global_batch_size"] // size,
    "gradient_clipping": case["clip_norm"],
    "zero_optimization": {"stage": case["parallel"]["zero"]},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": bfloat16},
    "communication_data_type": "fp32",
    "steps_per_print": 2**62,
}
deepspeed.init_distributed("gloo")
gate = Gate()
model = build(case)
engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=build_optimizer(case, model), config=config)
log = Log(case, rank)
for step, (tokens, targets, segments) in enumerate(batches(case, rank, size)):
    gate(step)
    total = count(targets)
    dist.all_reduce(total)
    loss = loss_sum(engine(tokens, segments), targets) / total
    engine.backward(loss * size)
    set_rate(case, optimizer, step)
    engine.step()  # clips, updates and clears the gradients
    log(step, loss.detach())
gate.finish(log.losses)
