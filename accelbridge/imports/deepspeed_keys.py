"""Keys of a DeepSpeed config that need no code: what each is, as data. Free of torch.

Names, defaults and meanings are those of DeepSpeed at commit edaa7221 (2026-08-22): ``docs/_pages/config-json.md``,
``deepspeed/runtime/config.py``, ``constants.py``, ``precision_config.py``, ``zero/config.py``,
``zero/offload_config.py``, ``activation_checkpointing/config.py`` and ``monitor/config.py``.
"""

from __future__ import annotations

from typing import Any

_BUCKETS = "the sizes of messages follow from the shard units of the model"
_FETCH = "a shard unit is gathered before it runs and freed after; how early is decided there"
_LOG = "metrics.jsonl has it, or 'accelbridge report' shows it"
_FIRST = "gradients are summed in precision.reduce and divided once"
_ALLOCATOR = "how memory is laid out, which no number depends on"
_CODE = "which code computes the same numbers"

ZERO = "zero_optimization"

IGNORED: dict[str, str] = {
    f"{ZERO}.contiguous_gradients": _ALLOCATOR,
    f"{ZERO}.reduce_scatter": "gradients are reduced by reduce-scatter wherever they are sharded",
    f"{ZERO}.reduce_bucket_size": _BUCKETS,
    f"{ZERO}.use_multi_rank_bucket_allreduce": _BUCKETS,
    f"{ZERO}.allgather_partitions": "parameters are gathered by all-gather",
    f"{ZERO}.allgather_bucket_size": _BUCKETS,
    f"{ZERO}.overlap_comm": "communication always overlaps where the backend has streams",
    f"{ZERO}.load_from_fp32_weights": "checkpoints keep what precision.params says",
    f"{ZERO}.elastic_checkpoint": "every checkpoint loads into another layout",
    f"{ZERO}.sub_group_size": "the optimizer is not tiled on the device",
    f"{ZERO}.prefetch_bucket_size": _FETCH,
    f"{ZERO}.param_persistence_threshold": _FETCH,
    f"{ZERO}.model_persistence_threshold": _FETCH,
    f"{ZERO}.max_live_parameters": _FETCH,
    f"{ZERO}.max_reuse_distance": _FETCH,
    f"{ZERO}.module_granularity_threshold": _FETCH,
    f"{ZERO}.use_all_reduce_for_fetch_params": _FETCH,
    f"{ZERO}.allgather_sequential": _FETCH,
    f"{ZERO}.gather_16bit_weights_on_model_save": "'accelbridge checkpoint export --dtype bfloat16' writes them",
    f"{ZERO}.gather_fp16_weights_on_model_save": "'accelbridge checkpoint export --dtype float16' writes them",
    f"{ZERO}.ignore_unused_parameters": "unused parameters are allowed",
    f"{ZERO}.legacy_stage1": _CODE,
    f"{ZERO}.round_robin_gradients": _CODE,
    f"{ZERO}.memory_efficient_linear": _CODE,
    f"{ZERO}.pipeline_loading_checkpoint": "checkpoints are read shard by shard",
    f"{ZERO}.override_module_apply": "initial values are made by shard; apply() is not patched",
    f"{ZERO}.log_trace_cache_warnings": "there is no such cache",
    f"{ZERO}.enable_sanity_checks": "guards and parallel.check_collectives are the checks here",
    f"{ZERO}.mics_hierarchical_params_gather": "backends choose how a collective travels",
    "fp16.auto_cast": "inputs are cast to precision.compute anyway",
    "fp16.hysteresis": "the scale goes down at the first overflow; scales are powers of two, which round nothing",
    "fp16.consecutive_hysteresis": "the scale goes down at the first overflow",
    "bf16.immediate_grad_update": _CODE,
    "optimizer.legacy_fusion": _CODE,
    "optimizer.params.torch_adam": "the execution plan chooses the implementation, see 'accelbridge explain'",
    "optimizer.params.set_grad_none": "gradients are freed after every update",
    "activation_checkpointing.partition_activations": "saved activations are sharded as the layout shards them",
    "activation_checkpointing.number_checkpoints": "it sizes a buffer that does not exist here",
    "activation_checkpointing.contiguous_memory_optimization": _ALLOCATOR,
    "activation_checkpointing.synchronize_checkpoint_boundary": _CODE,
    "activation_checkpointing.profile": _LOG,
    "zero_allow_untested_optimizer": "the optimizer is one that is tested with every layout",
    "zero_force_ds_cpu_optimizer": _CODE,
    "disable_allgather": "parameters are gathered by all-gather",
    "prescale_gradients": _FIRST,
    "gradient_predivide_factor": _FIRST,
    "dataloader_drop_last": "every step has a whole global batch",
    "vocabulary_size": "DeepSpeed only warns by it; model.vocab_size is the recipe's",
    "steps_per_print": "metrics.interval says when metrics are read; guards act only then",
    "wall_clock_breakdown": _LOG,
    "memory_breakdown": _LOG,
    "dump_state": "the log begins with the whole plan",
    "log_level": "there is one log file per rank",
    "timers": _LOG,
    "flops_profiler": f"{_LOG}; 'accelbridge estimate' counts before a run",
    "comms_logger": "set parallel.check_collectives to look at every collective",
    "wandb": _LOG,
    "csv_monitor": _LOG,
    "comet": _LOG,
    "checkpoint": "ranks agree on every checkpoint, each is verified and loads into another layout",
    "nebula": "checkpoints are asynchronous already, see checkpoint.asynchronous",
    "datastates": "checkpoints are asynchronous already, see checkpoint.asynchronous",
    "autotuning": "it is a mode of DeepSpeed's launcher; 'accelbridge estimate' says what fits",
    "compile": "set train.compile: true to compile each shard unit",
    "graph_harvesting": "set train.capture: true to record a microbatch as one graph",
    "use_data_before_expert_parallelism": "there is no expert axis yet",
    "seq_parallel_communication_data_type": "collectives of sequence parallelism carry precision.compute",
}
"""What changes no number of a run, or is done in any case. A section stands for all it holds."""

OFF: dict[str, tuple[tuple[Any, ...], str]] = {
    f"{ZERO}.zero_hpz_partition_size": ((0, 1), "there is no second partition of parameters within a node"),
    f"{ZERO}.mics_shard_size": ((-1,), "set parallel.dp_shard to this size and parallel.dp_replicate to the rest"),
    f"{ZERO}.zero_quantized_weights": ((False,), "parameters are gathered in the dtype they are computed in"),
    f"{ZERO}.zero_quantized_nontrainable_weights": ((False,), "frozen parameters keep their dtype"),
    f"{ZERO}.zero_quantized_gradients": ((False,), "gradients are reduced in float32 or bfloat16"),
    f"{ZERO}.zeropp_loco_param": (({},), "gradients are not quantized"),
    f"{ZERO}.zenflow": (({},), "there is no such update"),
    f"{ZERO}.leaf_module": (({},), "shard units are named by the model's sharding spec"),
    f"{ZERO}.save_muon_momentum_buffer_in_memory": ((False,), "the optimizer is AdamW"),
    "fp16.fp16_master_weights_and_grads": ((False,), "with compute float16 the optimizer keeps float32"),
    "optimizer.params.bias_correction": ((True,), "AdamW always corrects the bias of its moments"),
    "optimizer.params.amsgrad": ((False,), "AdamW here keeps no maximum of its moments"),
    "optimizer.params.fp32_optimizer_states": ((True,), "set precision.params for the dtype of moments"),
    "optimizer.params.max_grad_norm": ((0,), "DeepSpeed refuses it too; write gradient_clipping"),
    "gradient_allreduce_op": (("mean",), "the loss is divided by the tokens of the whole batch"),
    "managed_gradient_accumulation": ((True,), "the trainer counts the microbatches"),
    "sparse_gradients": ((False,), "gradients of embeddings are dense"),
    "sequence_parallel_size": ((1,), "context parallelism (parallel.cp) is not built yet"),
    "amp": (("off",), "write bf16 or fp16"),
    "torch_autocast": (("off",), "write bf16 or fp16"),
    "tensor_parallel": (("off",), "set parallel.tp, for a model with a sharding spec"),
    "expert_parallel": (("off",), "expert parallelism is not built yet"),
    "pipeline": (("off",), "pipeline parallelism is not built yet"),
    "hybrid_engine": (("off",), "there is no inference inside of training"),
    "elasticity": (("off",), "the batch of a step stays; 'accelbridge train --max-restarts' restarts a run"),
    "compression_training": (("off",), "there is no pruning or quantization of weights while training"),
    "weight_quantization": (("off",), "'accelbridge checkpoint export --quantize' quantizes weights afterwards"),
    "sparse_attention": (("off",), "attention is dense or a sliding window"),
    "progressive_layer_drop": (("off",), "every layer runs in every step"),
    "eigenvalue": (("off",), "nothing here takes it"),
    "curriculum_learning": (("off",), "every step has samples of train.seq_len tokens"),
    "data_efficiency": (("off",), "data is sampled in the order of train.seed"),
}
"""What changes a run and has no setting: harmless at these values, refused at others. "off": a section is harmless
while it says ``enabled: false``, or holds nothing."""

NOT_BUILT: dict[str, str] = {
    f"{ZERO}.offload_optimizer": "memory.offload.optimizer (host or nvme, path, buffer_count) is not built yet",
    f"{ZERO}.offload_param": "memory.offload.parameters (host or nvme, path, buffer_count, buffer_size) "
    "is not built yet",
    f"{ZERO}.cpu_offload": "memory.offload.optimizer is not built yet",
    f"{ZERO}.cpu_offload_param": "memory.offload.parameters is not built yet",
    f"{ZERO}.cpu_offload_use_pin_memory": "memory.offload is not built yet",
    "activation_checkpointing.cpu_checkpointing": "memory.offload.activations is not built yet",
}
"""Refused unless off (``device: none``, false) until ``memory.offload`` exists: then a row moves to the code."""

MEANT_FOR_OFFLOAD = ("aio",)
"""Sections that only tune the offload above: ignored, as what they tune is refused or off."""

STAGE3 = tuple(
    f"{ZERO}.{name}"
    for name in (
        "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
        "max_reuse_distance", "gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save",
        "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential",
    )
)  # fmt: skip
"""Keys that DeepSpeed also knows as ``stage3_NAME``, and mostly documents so."""

MAPPED = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "communication_data_type", "data_types.grad_accum_dtype", "data_types.param_dtype",
    "data_types.buffer_dtype", "tensorboard.enabled", "tensorboard.output_path", "tensorboard.job_name",
    f"{ZERO}.stage", "bf16.enabled", "bf16.check_grad_overflow", "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states", "fp16.enabled", "fp16.loss_scale", "fp16.initial_scale_power",
    "fp16.loss_scale_window", "fp16.min_loss_scale", "optimizer.type", "optimizer.params.lr",
    "optimizer.params.betas", "optimizer.params.eps", "optimizer.params.weight_decay", "optimizer.params.adam_w_mode",
    "scheduler.type", "scheduler.params.warmup_min_lr", "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_num_steps", "scheduler.params.warmup_type", "scheduler.params.total_num_steps",
    "scheduler.params.warmup_min_ratio", "scheduler.params.cos_min_ratio",
)  # fmt: skip
"""Keys that :mod:`accelbridge.imports.deepspeed` turns into settings."""

AUTO: dict[str, str] = {
    "train_batch_size": "train.global_batch_size",
    "train_micro_batch_size_per_gpu": "train.microbatch_size",
    "gradient_accumulation_steps": "train.microbatch_size",
    "gradient_clipping": "optimizer.clip_norm",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.betas": "optimizer.beta1 and optimizer.beta2",
    "optimizer.params.eps": "optimizer.eps",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "scheduler.params.warmup_max_lr": "optimizer.lr",
    "scheduler.params.warmup_num_steps": "optimizer.warmup_steps",
    "scheduler.params.total_num_steps": "train.steps",
    "fp16.enabled": "precision.compute",
    "bf16.enabled": "precision.compute",
}
"""What Hugging Face's Trainer fills in from its own arguments where the file says "auto" (transformers 5.24.0,
``integrations/deepspeed.py``, ``trainer_config_process`` and ``trainer_config_finalize``), by the setting to write
instead."""


SECTIONS = (ZERO, "bf16", "fp16", "optimizer", "optimizer.params", "scheduler", "scheduler.params", "data_types",
            "tensorboard", "activation_checkpointing")  # fmt: skip
"""What holds keys that are judged one by one."""


def known_keys() -> list[str]:
    """Dotted names of all keys that have a verdict of their own."""
    stage3 = [f"{ZERO}.stage3_{key.rpartition('.')[2]}" for key in STAGE3]
    return [*MAPPED, *IGNORED, *OFF, *NOT_BUILT, *MEANT_FOR_OFFLOAD, *stage3]
