"""DeepSpeed's ``ds_config.json`` as a recipe: same batch, precision, clipping, update and sharding, or a refusal.

What a key means and what DeepSpeed does where it is absent: see the sources that
:mod:`accelbridge.imports.deepspeed_keys` names, and ``deepspeed/runtime/lr_schedules.py`` of the same commit for the
schedules.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from accelbridge.imports.deepspeed_keys import (
    AUTO,
    IGNORED,
    MEANT_FOR_OFFLOAD,
    NOT_BUILT,
    OFF,
    SECTIONS,
    STAGE3,
    ZERO,
    known_keys,
)
from accelbridge.imports.source import Source

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def import_deepspeed(path: Path, devices: int | None = None) -> Source:
    """The recipe and the verdicts on every key of the DeepSpeed config at ``path``.

    ``devices`` is the number of data-parallel ranks, where the file leaves it open. Raises ConfigError for a file
    that is neither JSON nor YAML; a key that cannot be honoured is a finding, not an error.
    """
    source = Source.load(path)
    _rename(source)
    _sections(source)
    _autos(source)
    devices = _batch(source, devices)
    _zero(source, devices)
    _precision(source)
    _optimizer(source)
    _schedule(source)
    _rest(source)
    _by_table(source)
    return source


def _rename(source: Source) -> None:
    """Old spellings that DeepSpeed still takes: one name per key from here on. The places keep the file's."""
    tree, places = source.document.value, source.document.places
    if "bfloat16" in tree and "bf16" not in tree:
        tree["bf16"] = tree.pop("bfloat16")
        for keys in [keys for keys in places if keys[0] == "bfloat16"]:
            places[("bf16", *keys[1:])] = places[keys]
    zero = tree.get(ZERO)
    if isinstance(zero, bool):
        tree[ZERO] = zero = {"stage": int(zero)}
    if isinstance(zero, dict):
        for name in [key.rpartition(".")[2] for key in STAGE3]:
            if f"stage3_{name}" in zero and name not in zero:
                zero[name] = zero.pop(f"stage3_{name}")
                places[(ZERO, name)] = places[(ZERO, f"stage3_{name}")]
                source.spelled[f"{ZERO}.{name}"] = f"{ZERO}.stage3_{name}"


def _sections(source: Source) -> None:
    """Sections are mappings: anything else is refused here, and taken as absent from here on."""
    for section in SECTIONS:
        if source.take(section, "a section") is None and source.has(section):
            source.remove(section)


def _autos(source: Source) -> None:
    for key, setting in AUTO.items():
        if source.is_auto(key):
            source.leave_open(key, f'"auto": Hugging Face fills it from its own arguments; set {setting}')


# ------------------------------------------------------------------------------------------------------------ batch


def _batch(source: Source, devices: int | None) -> int | None:
    """Batch sizes as DeepSpeed completes them; returns the number of data-parallel ranks as far as it is known."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, accumulated = (_positive(source, name) for name in names)
    if total and micro and accumulated:
        asked, rest = divmod(total, micro * accumulated)
        if rest or devices not in (None, asked):
            ranks = f"{devices} (--devices)" if devices else "any number of ranks"
            source.refuse(names[0], f"it is not {micro} * {accumulated} * {ranks}; correct one of the three")
            return devices
        devices = asked
    if total is None and micro and devices:
        total = micro * (accumulated or 1) * devices
        source.assume(names[0], "train.global_batch_size", total, f"of {devices} ranks")
    elif total is None and micro:
        source.refuse(names[1], "the whole batch follows from the number of ranks; give --devices N")
        return devices
    elif total:
        source.honour(names[0], "train.global_batch_size", total)
    if micro:
        source.honour(names[1], "train.microbatch_size", micro)
    if accumulated and not (source.is_auto(names[0]) or source.is_auto(names[1])):
        _accumulated(source, total, micro, accumulated, devices)
    elif accumulated:
        source.leave_open(names[2], "it follows from train.global_batch_size, train.microbatch_size and the ranks")
    if not source.has(names[0]) and not micro:
        source.leave_open(names[0], "absent; set train.global_batch_size")
    return devices


def _accumulated(source: Source, total: int | None, micro: int | None, steps: int, devices: int | None) -> None:
    name = "gradient_accumulation_steps"
    if micro:
        source.judge("honoured", name, f"with train.microbatch_size on {devices or 'as many as give it'} ranks")
    elif steps == 1:
        source.judge("honoured", name, "train.microbatch_size absent: no accumulation")
    elif total and devices and total % (devices * steps) == 0:
        source.honour(name, "train.microbatch_size", total // (devices * steps), f"on {devices} ranks")
    elif total and devices:
        source.refuse(name, f"{total} sequences do not split into {steps} microbatches on {devices} ranks")
    elif total:
        source.refuse(name, "the size of a microbatch follows from the number of ranks; give --devices N")
    else:
        source.refuse(name, "it says nothing without train_batch_size or train_micro_batch_size_per_gpu; add one")


def _positive(source: Source, key: str) -> int | None:
    value = source.take(key, "an integer")
    if value is not None and value <= 0:
        source.refuse(key, "it takes an integer above 0; correct it")
        return None
    return value


# ------------------------------------------------------------------------------------------- sharding and precision


def _zero(source: Source, devices: int | None) -> None:
    key = f"{ZERO}.stage"
    stage = source.take(key, "an integer", 0)
    note = "absent: stage 0" if not source.has(key) else ""
    if stage in (1, 2, 3):
        source.honour(key, "parallel.zero", stage)
        source.put("parallel.dp_shard", "auto")
    elif stage != 0:
        source.refuse(key, "stages are 0, 1, 2 and 3")
    elif devices is None:
        source.refuse(key, f"{note and f'{note}; '}every rank keeps all state; give --devices N, or write stage 1")
    else:
        source.put("parallel.dp_shard", 1)
        verdict = source.assume if note else source.honour
        verdict(key, "parallel.dp_replicate", devices, note or "every rank keeps all state")


def _precision(source: Source) -> None:
    bfloat, half = (source.take(f"{name}.enabled", "true or false", False) for name in ("bf16", "fp16"))
    if bfloat and half:
        source.refuse("fp16.enabled", "bf16.enabled is true as well; DeepSpeed takes one of the two")
        return
    compute = "bfloat16" if bfloat else "float16" if half else "float32"
    for name, on in (("bf16", bfloat), ("fp16", half)):
        if on:
            source.honour(f"{name}.enabled", "precision.compute", compute)
        elif source.has(f"{name}.enabled"):
            source.ignore(f"{name}.enabled", "off")
    if not (bfloat or half or source.is_auto("bf16.enabled") or source.is_auto("fp16.enabled")):
        source.assume("bf16", "precision.compute", "float32", "neither bf16 nor fp16 is on")
    _bfloat16(source, bfloat)
    _float16(source, half)
    _wire(source, compute)


def _bfloat16(source: Source, on: bool) -> None:
    weights, states, overflow = (
        f"bf16.{name}" for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states", "check_grad_overflow")
    )
    narrow = [source.take(key, "true or false", False) and on for key in (weights, states)]
    if all(narrow):
        for key in (weights, states):
            source.honour(key, "precision.params", "bfloat16")
    elif narrow[0]:
        source.refuse(weights, "precision.params is the dtype of weights and moments alike; set both keys or none")
    for key in (weights, states):
        if source.has(key):
            source.ignore(key, "off: the optimizer keeps float32")
    checked = source.take(overflow, "true or false", True)
    if on and checked:
        verdict = source.honour if source.has(overflow) else source.assume
        verdict(overflow, "guards.nonfinite", "skip", "guards.max_skips of them in a row stop the run")
    elif source.has(overflow):
        source.ignore(overflow, "an update that is not finite is never made; guards.nonfinite says what follows")


def _float16(source: Source, on: bool) -> None:
    fixed = source.take("fp16.loss_scale", "a number", 0)
    names = {"initial_scale_power": "initial", "loss_scale_window": "growth_interval", "min_loss_scale": "min"}
    values = {name: source.take(f"fp16.{name}", "an integer", d) for name, d in zip(names, (16, 1000, 1), strict=True)}
    if not on:
        for name in ("loss_scale", *names):
            if source.has(f"fp16.{name}"):
                source.ignore(f"fp16.{name}", "the file does not turn fp16 on, and no loss is scaled")
        return
    if fixed:
        source.honour("fp16.loss_scale", "precision.loss_scale", float(fixed))
        for name in names:
            if source.has(f"fp16.{name}"):
                source.ignore(f"fp16.{name}", "the scale is fixed")
        return
    if not 0 <= values["initial_scale_power"] <= 100:
        source.refuse("fp16.initial_scale_power", "it takes an integer from 0 to 100")
        return
    values["initial_scale_power"] = 2.0 ** values["initial_scale_power"]
    values["min_loss_scale"] = float(values["min_loss_scale"])
    source.put("precision.loss_scale", {setting: values[name] for name, setting in names.items()})
    if source.has("fp16.loss_scale"):
        source.judge("honoured", "fp16.loss_scale", "precision.loss_scale is dynamic")
    for name, setting in names.items():
        verdict = "honoured" if source.has(f"fp16.{name}") else "default"
        source.judge(verdict, f"fp16.{name}", f"precision.loss_scale.{setting}: {values[name]:g}")


def _wire(source: Source, compute: str) -> None:
    """Dtypes of communication and accumulation."""
    key = "communication_data_type"
    dtype = source.take(key, "text")
    if dtype is None and compute != "float32":
        source.judge("default", key, f"precision.reduce stays float32; DeepSpeed would reduce in {compute}")
    elif dtype is None:
        pass
    elif _DTYPES.get(dtype.lower()) in ("float32", "bfloat16"):
        source.honour(key, "precision.reduce", _DTYPES[dtype.lower()])
    else:
        source.refuse(key, "gradients are reduced in fp32 or bf16")
    for name in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        key = f"data_types.{name}"
        if (dtype := source.take(key, "text")) is None:
            continue
        if name == "grad_accum_dtype" and _DTYPES.get(dtype) == source.recipe["precision"].get("reduce", "float32"):
            source.judge("honoured", key, "gradients are summed in precision.reduce")
        elif name == "param_dtype" and _DTYPES.get(dtype) == compute:
            source.judge("honoured", key, "precision.compute")
        else:
            source.refuse(key, "gradients are summed in precision.reduce, and parameters used in precision.compute")


# ---------------------------------------------------------------------------------------------------------- update


def _optimizer(source: Source) -> None:
    key = "gradient_clipping"
    norm = source.take(key, "a number")
    if norm is not None and norm < 0:
        source.refuse(key, "it takes a number of at least 0; correct it")
    elif norm is not None:
        source.honour(key, "optimizer.clip_norm", float(norm) or None, "" if norm else "no clipping")
    elif not source.is_auto(key):
        source.assume(key, "optimizer.clip_norm", 1.0, "DeepSpeed's default of today; older ones did not clip (#8068)")
    if not source.has("optimizer"):
        source.leave_open("optimizer", "absent: the code makes it; set the section optimizer")
        return
    name = source.take("optimizer.type", "text", "")
    decay = source.take("optimizer.params.weight_decay", "a number", 0.0)
    decoupled = name.lower() == "adamw" or source.take("optimizer.params.adam_w_mode", "true or false", True)
    if name.lower() not in ("adam", "adamw"):
        source.refuse("optimizer.type", "the optimizer here is AdamW")
    elif not decoupled and decay:
        source.refuse(
            "optimizer.params.adam_w_mode", "AdamW decays weights apart from the gradient; set weight_decay 0"
        )
    else:
        source.honour("optimizer.type", "optimizer.name", "adamw", "" if name.lower() == "adamw" else "AdamW's decay")
    if source.has("optimizer.params.adam_w_mode"):
        source.ignore("optimizer.params.adam_w_mode", "AdamW; without weight decay the two are the same")
    _moments(source)
    _decay(source, float(decay))
    rate = source.take("optimizer.params.lr", "a number")
    if rate is not None and rate <= 0:
        source.refuse("optimizer.params.lr", "it takes a number above 0; correct it")
    elif rate is not None:
        source.honour("optimizer.params.lr", "optimizer.lr", float(rate))
    elif not source.is_auto("optimizer.params.lr"):
        source.assume("optimizer.params.lr", "optimizer.lr", 1e-3, "DeepSpeed's default")


def _moments(source: Source) -> None:
    key = "optimizer.params.betas"
    pair = source.take("optimizer.params", "a section", {}).get("betas")
    if isinstance(pair, list) and len(pair) == 2 and all(isinstance(b, int | float) and 0 <= b < 1 for b in pair):
        source.put("optimizer.beta1", float(pair[0]))
        source.honour(key, "optimizer.beta2", float(pair[1]), f"optimizer.beta1: {pair[0]}")
    elif pair is not None and pair != "auto":
        source.refuse(key, "it takes two numbers of at least 0 and below 1; correct it")
    elif pair is None:
        source.put("optimizer.beta1", 0.9)
        source.assume(key, "optimizer.beta2", 0.999, "optimizer.beta1: 0.9; DeepSpeed's defaults")
    key = "optimizer.params.eps"
    eps = source.take(key, "a number")
    if eps is not None and eps <= 0:
        source.refuse(key, "it takes a number above 0; correct it")
    elif eps is not None:
        source.honour(key, "optimizer.eps", float(eps))


def _decay(source: Source, decay: float) -> None:
    key = "optimizer.params.weight_decay"
    if source.is_auto(key):
        return
    verdict = source.honour if source.has(key) else source.assume
    if decay < 0:
        source.refuse(key, "it takes a number of at least 0; correct it")
    elif decay == 0:
        verdict(key, "optimizer.weight_decay", 0.0, "" if source.has(key) else "DeepSpeed's default")
    else:
        # DeepSpeed decays every parameter that it is given; left alone, the recipe would spare vectors.
        source.put("optimizer.groups", [{"pattern": "*", "weight_decay": decay}])
        verdict(key, "optimizer.weight_decay", decay, "of vectors too, by optimizer.groups")


# -------------------------------------------------------------------------------------------------------- schedule


def _schedule(source: Source) -> None:
    """The three schedules that are a linear warm-up and a known curve."""
    if not source.has("scheduler"):
        if source.has("optimizer"):
            source.assume("scheduler", "optimizer.schedule", "constant", "absent; the code may have another")
        return
    name = source.take("scheduler.type", "text", "")
    if name not in ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"):
        source.refuse("scheduler", "there are WarmupLR, WarmupDecayLR and WarmupCosineLR; or set optimizer.schedule")
        return
    warmup, total = _warmup(source), _positive(source, "scheduler.params.total_num_steps")
    if name != "WarmupCosineLR":
        _peak(source, 0.001 if name == "WarmupDecayLR" else None)
    if name == "WarmupLR":
        source.honour("scheduler.type", "optimizer.schedule", "constant", "after the warm-up")
        return
    if total:
        source.honour("scheduler.params.total_num_steps", "train.steps", total)
    elif not source.is_auto("scheduler.params.total_num_steps"):
        source.refuse("scheduler.params.total_num_steps", f"absent; {name} needs it; add it")
    if name == "WarmupCosineLR":
        source.honour("scheduler.type", "optimizer.schedule", "cosine")
        ratio = source.take("scheduler.params.cos_min_ratio", "a number", 0.0001)
        verdict = source.honour if source.has("scheduler.params.cos_min_ratio") else source.assume
        verdict("scheduler.params.cos_min_ratio", "optimizer.min_lr_ratio", ratio, "of the peak")
    elif total is None:
        source.leave_open(
            "scheduler.type", "set optimizer.schedule: wsd with decay_steps of train.steps - warmup_steps"
        )
    elif total <= (warmup or 0):
        source.refuse("scheduler.params.total_num_steps", "the warm-up takes all of it, and nothing is left to decay")
    else:
        source.recipe.setdefault("optimizer", {}).update(
            decay_steps=total - (warmup or 0), decay_shape="linear", min_lr_ratio=0.0
        )
        source.honour("scheduler.type", "optimizer.schedule", "wsd", "its decay is linear, to 0, from the warm-up on")


def _warmup(source: Source) -> int | None:
    """Steps of the warm-up; those of DeepSpeed start one update later, after a first one at the lowest rate."""
    for name in ("warmup_min_lr", "warmup_min_ratio"):
        key = f"scheduler.params.{name}"
        lowest = source.take(key, "a number", 0)
        if source.has(key):
            source.refuse(key, "the warm-up starts at 0") if lowest else source.ignore(key, "the warm-up starts at 0")
    key = "scheduler.params.warmup_type"
    kind = source.take(key, "text", "log")
    if kind == "linear":
        source.judge("honoured", key, "optimizer.warmup_steps rise linearly; the rate leads DeepSpeed's by 2 updates")
    else:
        found = "" if source.has(key) else "absent: log; "
        source.refuse(key, f"{found}the warm-up here is linear; write warmup_type: linear")
    key = "scheduler.params.warmup_num_steps"
    if source.is_auto(key):
        return None
    steps = max(2, _positive(source, key) or 1000)
    verdict = source.honour if source.has(key) else source.assume
    verdict(key, "optimizer.warmup_steps", steps, "" if source.has(key) else "DeepSpeed's default")
    return steps


def _peak(source: Source, default: float | None) -> None:
    key = "scheduler.params.warmup_max_lr"
    peak = source.take(key, "a number", default)
    if source.is_auto(key) or peak is None:
        return
    if peak <= 0:
        source.refuse(key, "it takes a number above 0; correct it")
        return
    verdict = source.honour if source.has(key) else source.assume
    verdict(key, "optimizer.lr", float(peak), "it replaces the optimizer's lr")


# ------------------------------------------------------------------------------------------------------------ rest


def _rest(source: Source) -> None:
    if source.take("tensorboard.enabled", "true or false", False):
        source.honour("tensorboard.enabled", "metrics.tensorboard", True)
    for name in ("enabled", "output_path", "job_name"):
        if source.has(f"tensorboard.{name}"):
            source.ignore(f"tensorboard.{name}", "off" if name == "enabled" else "files go to OUTPUT/tensorboard")
    section = source.take("activation_checkpointing", "a section", {})
    if any(section.values()):
        source.put("memory.recompute", "full")
        reason = "memory.recompute: full; DeepSpeed leaves to the model's code what is computed again"
        source.judge("honoured", "activation_checkpointing", reason)
        if section.get("cpu_checkpointing"):
            key = "activation_checkpointing.cpu_checkpointing"
            source.refuse(key, NOT_BUILT[key])


def _by_table(source: Source) -> None:
    """Everything that no code above has judged."""
    for sections in (IGNORED, MEANT_FOR_OFFLOAD, OFF, NOT_BUILT):
        for key in sections:
            if source.has(key):
                _judge_row(source, key)
    known = known_keys()
    for key, value in list(source.unjudged()):
        if (value is None or value == {}) and (key in SECTIONS or key in known):
            source.ignore(key, "nothing in it")
            continue
        if key in known:
            source.refuse(key, "it does not go with what the file says beside it; remove it")
            continue
        section, _, word = key.rpartition(".")
        depth = key.count(".")
        siblings = {".".join(k.split(".")[: depth + 1]) for k in known if k.startswith(f"{section}.") or not section}
        siblings = [k.rpartition(".")[2] for k in sorted(siblings)]
        close = get_close_matches(word, siblings, n=1, cutoff=0.6)
        did = f'did you mean "{close[0]}"?' if close else "remove it"
        source.refuse(key, f"unknown key in {section or 'a DeepSpeed config'}; {did}")


def _judge_row(source: Source, key: str) -> None:
    if key in IGNORED:
        source.ignore(key, IGNORED[key])
    elif key in MEANT_FOR_OFFLOAD:
        source.ignore(key, "it tunes the offload to NVMe, which is off or refused")
    else:
        harmless, reason = OFF.get(key, (("off", False), NOT_BUILT.get(key, "")))
        if _is_off(source, key, harmless):
            source.ignore(key, "off")
        else:
            source.refuse(key, reason)


def _is_off(source: Source, key: str, harmless: tuple[Any, ...]) -> bool:
    node: Any = source.document.value
    for part in key.split("."):
        node = node[part]
    if isinstance(node, dict):
        return not node or ("off" in harmless and (node.get("enabled") is False or node.get("device") == "none"))
    return node in harmless
