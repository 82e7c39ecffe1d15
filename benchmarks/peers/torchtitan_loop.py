"""torchtitan's own Trainer on FSDP2. It supports accelerators only: the first lines let it run on a CPU."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import contextlib
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from bare_loop import Llama, batches, build, rate, start
from gate import Gate

torch._utils._get_available_device_type = lambda: "cpu"
cpu: Any = torch.cpu
cpu.get_device_name = lambda device=None: "cpu"
cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1)
cpu.reset_peak_memory_stats = cpu.empty_cache = lambda: None
cpu.memory_stats = lambda device=None: {}
unused: Any = SimpleNamespace(generate_permute_indices=None)  # a Triton kernel for experts, imported in any case
sys.modules["torchtitan.models.moe.kernels"] = unused

import torchtitan.distributed.utils as dist_utils  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import build_cross_entropy_loss  # noqa: E402
from torchtitan.components.lr_scheduler import LRSchedulersContainer  # noqa: E402
from torchtitan.components.optimizer import build_optimizers  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.protocols.model import BaseModelArgs  # noqa: E402
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

dist_utils.set_pg_timeouts = lambda **_: None  # its barrier names devices, which gloo refuses

case, rank, size = start()
gate = Gate()


@dataclass
class Args(BaseModelArgs):
    def update_from_config(self, job_config, **kwargs):
        pass

    def get_nparams_and_flops(self, model, seq_len):
        parameters = sum(p.numel() for p in model.parameters())
        return parameters, 6 * parameters


class Model(Llama):
    def __init__(self, args):
        super().__init__(**case["model"])

    def init_weights(self, buffer_device=None):
        """Each rank's rows of the initial values."""
        values = build(case).state_dict()
        for name, parameter in self.named_parameters():
            local = parameter.to_local()
            chunks = values[name].chunk(size)
            local.copy_(chunks[rank])


class Data(BaseDataLoader):
    def __iter__(self):
        for step, (tokens, targets, segments) in enumerate(batches(case, rank, size)):
            gate(step)
            yield {"input": tokens, "segments_BS": segments}, targets

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict):
        pass


def parallelize(model, parallel_dims, job_config):
    options = {"mesh": parallel_dims.get_mesh("fsdp"), "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    for module in [*model.layers, model]:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no other than a plain sum
    return model


def schedule(optimizers, lr_scheduler, steps):
    return LRSchedulersContainer(optimizers, lambda step: rate(case, min(step, steps - 1)) / case["lr"])


class Kept(Trainer):
    """Keeps every step's loss: torchtitan reads only those that it prints."""

    losses: list[torch.Tensor] = []

    def forward_backward_step(self, **kwargs):
        loss = super().forward_backward_step(**kwargs)
        self.losses.append(loss.detach())
        return loss


register_train_spec(
    "llama",
    TrainSpec(
        model_cls=Model,
        model_args={"case": Args()},
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_optimizers,
        build_lr_schedulers_fn=schedule,
        build_dataloader_fn=lambda **_: Data(),
        build_tokenizer_fn=None,
        build_loss_fn=build_cross_entropy_loss,
    ),
)
config = JobConfig()
config.job.dump_folder = case["output"]
config.model.name, config.model.flavor = "llama", "case"
config.optimizer.lr, config.optimizer.weight_decay = case["lr"], case["weight_decay"]
config.optimizer.beta2 = 0.95
config.training.local_batch_size = case["global_batch_size"] // size
config.training.seq_len, config.training.steps = case["seq_len"], case["steps"]
config.training.max_norm = case["clip_norm"]
config.metrics.log_freq = case["metrics_interval"]
config.comm.trace_buf_size = 0
trainer = Kept(config)
with contextlib.suppress(StopIteration):
    trainer.train()
losses = torch.stack(trainer.losses)
dist.all_reduce(losses)
gate.finish(losses.tolist())
