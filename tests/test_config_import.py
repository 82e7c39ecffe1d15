"""DeepSpeed configs as recipes: every key has a verdict, and the recipe trains with the file's numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from accelbridge import Trainer
from accelbridge.imports.deepspeed import import_deepspeed
from accelbridge.imports.deepspeed_keys import NOT_BUILT, known_keys
from accelbridge.imports.source import Source
from accelbridge.train.check import accumulation_steps
from accelbridge.train.config import TrainConfig
from accelbridge.train.optim import learning_rate
from tests import cli

pytestmark = pytest.mark.usefixtures("unbound")

FILE: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.25,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "stage3_param_persistence_threshold": "auto",
        "offload_param": {"device": "none"},
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 3, "warmup_max_lr": 2e-3, "warmup_type": "linear", "total_num_steps": 12},
    },
}


def imported(folder: Path, devices: int | None = None, /, **changes: Any) -> Source:
    path = folder / "ds_config.json"
    path.write_text(json.dumps(FILE | changes, indent="\t"))
    return import_deepspeed(path, devices)


def verdicts(source: Source) -> dict[str, str]:
    return {finding.key.split(" ")[0]: finding.verdict for finding in source.findings}


def refusals(source: Source) -> dict[str, str]:
    return {finding.key.split(" ")[0]: finding.reason for finding in source.refused()}


def test_an_imported_config_trains_with_its_numbers(tmp_path: Path, store: Path) -> None:
    base = cli.write_recipe(tmp_path / "base.yaml", store, optimizer={"schedule": "cosine"}, metrics={"interval": 1})
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    out = tmp_path / "made.yaml"
    done = cli.run("config", "import", str(tmp_path / "ds.json"), "--onto", str(base), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    config = TrainConfig.load(out)
    assert (config.train.global_batch_size, config.train.microbatch_size, config.train.steps) == (8, 2, 12)
    assert (config.optimizer.clip_norm, config.optimizer.lr, config.optimizer.eps) == (0.25, 2e-3, 1e-7)
    assert (config.optimizer.beta1, config.optimizer.beta2) == (0.8, 0.99)
    assert config.parallel.zero == 2
    assert (config.precision.compute, config.precision.params) == ("bfloat16", "float32")
    assert config.model is not None

    trainer = Trainer(TrainConfig.load(out, ["train.steps=4", "optimizer.decay_steps=1"]), backend="cpu")
    assert trainer.prepared.layout.zero == 2
    assert accumulation_steps(config.train, trainer.prepared.layout) == (2, 4)
    trainer.fit()
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.01}, "vectors too"
    lines = cli.steps_of(Path(config.output.dir))
    assert sorted(lines) == [1, 2, 3, 4]


def test_the_learning_rate_falls_as_the_file_says(tmp_path: Path) -> None:
    """Of DeepSpeed's ``WarmupDecayLR._get_gamma``: 1 at the end of the warm-up, then linear to 0 at the total."""
    optimizer = TrainConfig.of(imported(tmp_path).recipe).optimizer
    rates = [learning_rate(optimizer, step, 12) for step in range(12)]
    assert rates[2] == pytest.approx(2e-3)
    for iteration in range(3, 12):
        assert rates[iteration] == pytest.approx(2e-3 * (12 - iteration - 1) / (12 - 3))


def test_every_key_has_a_verdict_and_a_line(tmp_path: Path) -> None:
    source = imported(tmp_path)
    found = verdicts(source)
    assert found["zero_optimization.stage"] == "honoured"
    assert found["zero_optimization.reduce_bucket_size"] == "ignored"
    assert found["zero_optimization.stage3_param_persistence_threshold"] == "ignored", "by the file's own name"
    assert found["zero_optimization.offload_param"] == "ignored"
    assert source.refused() == []
    assert list(source.unjudged()) == []
    lines = {f.key.split(" ")[0]: f.line for f in source.findings}
    text = (tmp_path / "ds_config.json").read_text().splitlines()
    assert '"gradient_clipping"' in text[lines["gradient_clipping"] - 1]


@pytest.mark.parametrize("key", known_keys())
def test_no_known_key_is_called_unknown(tmp_path: Path, key: str) -> None:
    tree: dict[str, Any] = {}
    node = tree
    *sections, last = key.split(".")
    for section in sections:
        node = node.setdefault(section, {})
    node[last] = True
    if "scheduler" in tree:
        tree["scheduler"].setdefault("type", "WarmupCosineLR" if last.endswith("ratio") else "WarmupDecayLR")
    (tmp_path / "ds.json").write_text(json.dumps(tree))
    source = import_deepspeed(tmp_path / "ds.json", 1)
    assert "unknown" not in source.report()
    assert key in source.report()


def test_offload_is_refused_until_it_is_built(tmp_path: Path) -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme", "nvme_path": "/x"}}
    checkpointing = {"cpu_checkpointing": True, "number_checkpoints": 4}
    source = imported(tmp_path, zero_optimization=zero, activation_checkpointing=checkpointing)
    found = refusals(source)
    assert set(found) == {key for key in NOT_BUILT if "cpu_offload" not in key}
    assert all("not built yet" in reason for reason in found.values())
    assert source.recipe["memory"] == {"recompute": "full"}


@pytest.mark.parametrize(
    ("changes", "key", "reason"),
    [
        ({"gradient_cliping": 1.0}, "gradient_cliping", 'did you mean "gradient_clipping"?'),
        ({"zero_optimization": {"stage": 1, "stage3_max_live_params": 1}}, "zero_optimization.stage3_max_live_params",
         'did you mean "stage3_max_live_parameters"?'),
        ({"zero_optimisation": {}}, "zero_optimisation", 'did you mean "zero_optimization"?'),
        ({"zero_optimization": 3}, "zero_optimization", "it takes a section"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "stages are 0, 1, 2 and 3"),
        ({"train_batch_size": 9}, "train_batch_size", "it is not 2 * 4 * any number of ranks"),
        ({"train_batch_size": "8"}, "train_batch_size", "it takes an integer"),
        ({"fp16": {"enabled": True}}, "fp16.enabled", "one of the two"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads",
         "weights and moments alike"),
        ({"optimizer": {"type": "Lamb", "params": {}}}, "optimizer.type", "AdamW"),
        ({"optimizer": {"type": "Adam", "params": {"adam_w_mode": False, "weight_decay": 0.1}}},
         "optimizer.params.adam_w_mode", "weight_decay 0"),
        ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "optimizer.params.betas", "two numbers"),
        ({"scheduler": {"type": "OneCycle", "params": {}}}, "scheduler", "WarmupLR"),
        ({"scheduler": {"type": "WarmupLR", "params": {}}}, "scheduler.params.warmup_type", "absent: log"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_type": "linear"}}},
         "scheduler.params.total_num_steps", "needs it"),
        ({"communication_data_type": "fp16"}, "communication_data_type", "fp32 or bf16"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", "divided by the tokens"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention", "dense"),
        ({"pipeline": {"stages": 2}}, "pipeline", "not built yet"),
    ],
)  # fmt: skip
def test_what_would_train_otherwise_is_refused(tmp_path: Path, changes: dict[str, Any], key: str, reason: str) -> None:
    assert reason in refusals(imported(tmp_path, None, **changes))[key]


@pytest.mark.parametrize(
    ("sizes", "devices", "made"),
    [
        ((16, 2, 4), None, (16, 2)),
        ((16, None, None), None, (16, None)),
        ((16, 2, None), None, (16, 2)),
        ((16, None, 2), 2, (16, 4)),
        ((None, 2, 4), 2, (16, 2)),
        ((None, 2, None), 3, (6, 2)),
    ],
)
def test_batch_sizes_are_completed_as_deepspeed_does(
    tmp_path: Path, sizes: tuple[int | None, ...], devices: int | None, made: tuple[int, int | None]
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    source = imported(tmp_path, devices, **dict(zip(names, sizes, strict=True)))
    train = source.recipe["train"]
    assert source.refused() == []
    assert (train["global_batch_size"], train.get("microbatch_size")) == made


def test_sizes_that_need_the_number_of_ranks_say_so(tmp_path: Path) -> None:
    found = refusals(imported(tmp_path, train_batch_size=None))
    assert "give --devices N" in found["train_micro_batch_size_per_gpu"]
    assert (
        "give --devices N"
        in refusals(imported(tmp_path, train_batch_size=None, zero_optimization={}))["zero_optimization.stage"]
    )


def test_without_zero_every_rank_keeps_all_state(tmp_path: Path) -> None:
    parallel = imported(tmp_path, zero_optimization={"stage": 0}, train_micro_batch_size_per_gpu=1).recipe["parallel"]
    assert parallel == {"dp_shard": 1, "dp_replicate": 2}


def test_auto_is_left_open_and_says_what_to_set(tmp_path: Path) -> None:
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    params = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    source = imported(
        tmp_path,
        **auto,
        gradient_clipping="auto",
        bf16={"enabled": "auto"},
        fp16={"enabled": "auto", "loss_scale": 0, "hysteresis": 2},
        optimizer={"type": "AdamW", "params": params},
    )
    assert source.refused() == []
    opened = {f.key.split(" ")[0]: f.reason for f in source.findings if f.verdict == "open"}
    assert set(opened) >= {*auto, "gradient_clipping", "bf16.enabled", *(f"optimizer.params.{name}" for name in params)}
    assert "set train.microbatch_size" in opened["train_micro_batch_size_per_gpu"]
    assert "compute" not in source.recipe.get("precision", {})
    assert "clip_norm" not in source.recipe["optimizer"]


def test_float16_scales_the_loss_as_the_file_says(tmp_path: Path) -> None:
    half = {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "min_loss_scale": 2}
    source = imported(tmp_path, bf16={"enabled": False}, fp16=half)
    precision = TrainConfig.of(source.recipe).precision
    assert precision.compute == "float16"
    assert precision.loss_scale.model_dump() == {  # type: ignore[union-attr]
        "initial": 4096.0, "growth_interval": 500, "growth": 2.0, "backoff": 0.5, "min": 2.0,
    }  # fmt: skip
    fixed = imported(tmp_path, bf16={"enabled": False}, fp16=half | {"loss_scale": 128})
    assert TrainConfig.of(fixed.recipe).precision.loss_scale == 128.0


def test_a_refusal_writes_nothing_unless_asked(tmp_path: Path) -> None:
    path, out = tmp_path / "ds.yaml", tmp_path / "recipe.yaml"
    path.write_text("train_batch_size: 4\nzero_optimization: {stage: 3, offload_optimizer: {device: cpu}}\n")
    done = cli.run("config", "import", str(path), "--out", str(out))
    assert done.returncode == 2
    assert re.search(rf"refused   {path}:2: zero_optimization.offload_optimizer: .* not built yet", done.stderr)
    assert not out.exists()
    done = cli.run("config", "import", str(path), "--leave-out-refused")
    assert done.returncode == 0
    (tmp_path / "out.yaml").write_text(done.stdout)
    assert TrainConfig.load(tmp_path / "out.yaml").parallel.zero == 3


def test_nothing_is_overwritten_without_being_told(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(FILE))
    out = tmp_path / "recipe.yaml"
    out.write_text("kept")
    command = ("config", "import", str(tmp_path / "ds.json"), "--out", str(out))
    done = cli.run(*command)
    assert (done.returncode, out.read_text()) == (2, "kept")
    assert "it exists; give another path, or --overwrite" in done.stderr
    assert cli.run(*command, "--overwrite").returncode == 0
    assert TrainConfig.load(out).parallel.zero == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds.json", "recipe.yaml"]


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "not valid YAML"), ("[]", "a mapping of settings asked"), ('{"a": 1, "a": 2}', "appears twice")],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "ds.json").write_text(content)
    done = cli.run("config", "import", str(tmp_path / "ds.json"))
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
