"""Recipes: what YAML means, what is refused, and what the messages say."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from accelbridge.errors import AccelbridgeError, ConfigError
from accelbridge.parallel.layout import Layout
from accelbridge.train.config import TrainConfig
from accelbridge.train.places import Place, Places
from accelbridge.train.recipe import MOST_BYTES, load_recipe, validate
from accelbridge.train.yaml_core import read, scalar

MODEL = "model: {vocab_size: 257, dim: 32, layers: 2, heads: 4}\n"


def load(tmp_path: Path, text: str, *overrides: str) -> TrainConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_recipe(path, overrides)


def refused(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    """The lines of the error, with the folder cut off: ``recipe.yaml:2: ...``."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    message = str(caught.value)
    assert "Traceback" not in message
    assert "pydantic" not in message
    return message.replace(f"{tmp_path}{os.sep}", "").splitlines()


# ------------------------------------------------------------------------------------------- the core schema

SCALARS: dict[str, Any] = {
    "3e-4": 3e-4, "1e3": 1000.0, "1.": 1.0, ".5": 0.5, "-2.5E+1": -25.0, "+7": 7, "-7": -7, "017": 17,
    "0o17": 15, "0x1F": 31, ".inf": math.inf, "-.Inf": -math.inf, "+.INF": math.inf,
    "true": True, "True": True, "FALSE": False, "null": None, "~": None, "": None, "NULL": None,
    "yes": "yes", "no": "no", "on": "on", "off": "off", "y": "y", "1:30": "1:30", "1_000": "1_000",
    "2024-01-01": "2024-01-01", "0b1": "0b1", "1e": "1e", ".": ".", "e5": "e5", "nUll": "nUll", "0o8": "0o8",
    "1" * 101: float("1" * 101),
}  # fmt: skip


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_scalars_are_those_of_yaml_1_2(text: str, value: Any) -> None:
    found = read(f"key: {text}\n", "test").value["key"]
    assert (found, type(found)) == (value, type(value))
    assert scalar(text) == value


def test_nan_is_a_number() -> None:
    assert math.isnan(scalar(".nan"))


def test_quoted_text_and_blocks_stay_text() -> None:
    document = read("a: '5'\nb: \"true\"\nc: |\n  7\nd: >-\n  null\n", "test")
    assert document.value == {"a": "5", "b": "true", "c": "7\n", "d": "null"}


def test_a_yaml_directive_does_not_bring_the_old_rules_back(tmp_path: Path) -> None:
    (line,) = refused(tmp_path, f"%YAML 1.1\n---\n{MODEL}train: {{deterministic: yes}}\n")
    assert line.startswith('recipe.yaml:4: train.deterministic asked as "yes" (text)')


def test_anchors_and_aliases_are_copies(tmp_path: Path) -> None:
    text = f"{MODEL}backend:\n  ops: &one {{attention: sdpa}}\n  options: *one\n"
    config = load(tmp_path, text, "backend.ops.attention=reference")
    assert config.backend.ops == {"attention": "reference"}
    assert config.backend.options == {"attention": "sdpa"}


def test_aliases_cannot_blow_up(tmp_path: Path) -> None:
    lines = ["backend:", "  options:", "    a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"    a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (line,) = refused(tmp_path, "\n".join(lines))
    assert "more than 10,000 values" in line


# ------------------------------------------------------------------------------------------------- structure

STRUCTURE = [
    ("train:\n  steps: 3\n  steps: 4\n", 3, ['key "steps" in train appears twice', "first on line 2", "delete one"]),
    ("train: {}\ndata: {}\ntrain: {}\n", 3, ['key "train" in the recipe appears twice', "first on line 1"]),
    ("train:\n\tsteps: 3\n", 2, ["not valid YAML", "indent with spaces, not tabs"]),
    ("- model\n- data\n", 1, ["a recipe is a mapping of sections; found a list"]),
    ("hello\n", 1, ["a recipe is a mapping of sections; found text"]),
    ("train: steps: 3\n", 1, ["not valid YAML", "new line after"]),
    ("data: {}\ntrain: {steps: 1\n", 3, ["not valid YAML", "close the bracket"]),
    ("train: {steps: 1\x07}\n", 1, ["0x07 is not allowed"]),
    ("train: {steps: 1}\n---\ntrain: {steps: 2}\n", 2, ["a second document begins here"]),
    ("train:\n  1: 2\n", 2, ["key 1 in train is no text"]),
    ("train:\n  ? [a, b]\n  : 2\n", 2, ["a key in train is no text"]),
    ("train:\n  null: 2\n", 2, ["key null in train is no text"]),
    ("train: &t {steps: 3}\noptimizer:\n  <<: *t\n", 3, ['"<<" in optimizer', "no merge key", "write the settings"]),
    ("train: *nope\n", 1, ["alias *nope", "no value before it", "&nope"]),
    ("train: &t\n  steps: *t\n", 2, ["alias *t", "no value before it"]),
    ("backend: {name: !!python/object/apply:os.system [ls]}\n", 1, ["tag ", "os.system", "plain values", "remove it"]),
    ("backend: {name: !thing x}\n", 1, ["tag !thing", "plain values"]),
    ("train: {steps: !!binary aGVsbG8=}\n", 1, ["tag ", "binary"]),
    (f"backend: {'[' * 5000}\n", 1, ["nested more than 50 deep"]),
    (f"backend: {'[' * 60}{']' * 60}\n", 1, ["nested more than 50 deep"]),
]


@pytest.mark.parametrize(("text", "line", "parts"), STRUCTURE)
def test_structure_that_no_recipe_has(tmp_path: Path, text: str, line: int, parts: list[str]) -> None:
    first = refused(tmp_path, text)[0]
    assert first.startswith(f"recipe.yaml:{line}: ")
    for part in parts:
        assert part in first


def test_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"model:\n  # gr\xfc\xdfe\n")
    (tmp_path / "big.yaml").write_bytes(b"#" * (MOST_BYTES + 1))
    cases = {
        tmp_path / "absent.yaml": ["No such file", "give the path of a YAML recipe"],
        tmp_path: ["it is a folder", "give the path of a YAML recipe"],
        tmp_path / "latin.yaml": ["latin.yaml:2: not UTF-8", "save the recipe as UTF-8"],
        tmp_path / "big.yaml": ["more than 256 KiB"],
        tmp_path / "big.yaml" / "below": ["Not a directory"],
        tmp_path / "nul\0": ["cannot be read"],
        Path("/dev/zero"): ["more than 256 KiB"],
    }
    for path, parts in cases.items():
        with pytest.raises(ConfigError) as caught:
            load_recipe(path)
        for part in [str(path) if path.suffix != ".yaml" else path.name, *parts]:
            assert part in str(caught.value)


def test_an_empty_file_is_an_empty_recipe_with_a_byte_order_mark_too(tmp_path: Path) -> None:
    for text in ("", "\n", "# nothing yet\n", "---\n", "\ufeff", "null\n"):
        assert load(tmp_path, text) == TrainConfig()
    assert load(tmp_path, "\ufefftrain: {steps: 5}\n").train.steps == 5


# -------------------------------------------------------------------------------------------- values and types

TYPES = [
    ("train.steps", '"5"', ['"5" (text)', "an integer above 0", "write 5 without quotes"]),
    ("train.steps", "1_000", ['"1_000" (text)', "write 1000 without _"]),
    ("train.steps", "1:30", ['"1:30" (text)', "an integer above 0"]),
    ("train.steps", "true", ["true (true/false)", "an integer above 0"]),
    ("train.steps", "3.0", ["3.0 (number)", "an integer above 0", "write 3"]),
    ("train.steps", "1e3", ["1000.0 (number)", "write 1000"]),
    ("train.steps", "2.5", ["2.5 (number)", "an integer above 0"]),
    ("train.steps", "0", ["0 (integer)", "an integer above 0"]),
    ("train.steps", "null", ["null (nothing)", "an integer above 0", "leave the key out for its default"]),
    ("train.steps", "[1, 2]", ["a list of 2", "an integer above 0"]),
    ("train.steps", "9" * 30, ["(integer)", "below 9223372036854775808"]),
    ("train.seed", "-1", ["-1 (integer)", "an integer of at least 0"]),
    ("train.microbatch_size", "two", ['"two" (text)', "an integer above 0 or null"]),
    ("train.deterministic", "yes", ['"yes" (text)', "true or false", "write true"]),
    ("train.deterministic", "off", ['"off" (text)', "true or false", "write false"]),
    ("train.deterministic", "1", ["1 (integer)", "true or false"]),
    ("optimizer.lr", "0", ["0 (integer)", "a number above 0"]),
    ("optimizer.lr", "-1e-3", ["-0.001 (number)", "a number above 0"]),
    ("optimizer.lr", ".inf", ["inf (number)", "it is finite"]),
    ("optimizer.lr", ".nan", ["nan (number)", "it is finite"]),
    ("optimizer.lr", "fast", ['"fast" (text)', "a number above 0"]),
    ("optimizer.lr", "false", ["false (true/false)", "a number above 0"]),
    ("optimizer.clip_norm", "none", ['"none" (text)', "a number above 0 or null", "write null"]),
    ("optimizer.beta1", "1", ["1 (integer)", "a number of at least 0", "below 1"]),
    ("optimizer.schedule", "cosin", ['"cosin" (text)', "cosine, constant or wsd", 'did you mean "cosine"?']),
    ("optimizer.name", "sgd", ['"sgd" (text)', "it takes adamw"]),
    ("parallel.zero", "4", ["4 (integer)", "at least 1 and at most 3"]),
    ("parallel.zero", "true", ["true (true/false)", "an integer"]),
    ("parallel.dp_shard", "atuo", ['"atuo" (text)', "an integer of at least 1 or auto", 'did you mean "auto"?']),
    ("parallel.dp_shard", "0", ["0 (integer)", "an integer of at least 1 or auto"]),
    ("parallel.timeout", "1e300", ["1e+300 (number)", "at most 2592000"]),
    ("precision.params", "fp8", ['"fp8" (text)', "float32 or bfloat16", "set precision.compute: fp8"]),
    ("precision.compute", "float8_e4m3fn", ["float32, bfloat16, float16 or fp8", "formats under precision.fp8"]),
    ("precision.compute", "int8", ['"int8" (text)', "int8 holds no fractions", "use bfloat16"]),
    ("precision.params", "fp16", ['"float16" (text)', "float32 or bfloat16", "precision.compute only"]),
    ("precision.reduce", "16", ["16 (integer)", "float32 or bfloat16"]),
    ("memory.recompute", "all", ['"all" (text)', "none, selective or full"]),
    ("backend.ops", "sdpa", ['"sdpa" (text)', "a section of names and values"]),
    ("backend.ops.attention", "3", ["3 (integer)", "it takes text", 'write "3"']),
    ("backend.options", "[1]", ["a list of 1", "a section of names and values"]),
    ("backend.name", "[a]", ["a list of 1", "text or null"]),
    ("output.dir", '""', ['"" (text)', "it takes text"]),
    ("model.dim", "0", ["must be positive; found 0"]),
    ("model.dim", "32.0", ["32.0 (number)", "an integer", "write 32"]),
    ("model.dim", "null", ["null (nothing)", "an integer"]),
    ("model.softcap", "-1", ["must be positive; found -1"]),
    ("model.rope_theta", ".inf", ["must be positive; found inf"]),
    ("train", "hello", ['"hello" (text)', "a section with keys of its own (steps, seed, "]),
    ("train", "null", ["null (nothing)", "a section", "leave the key out"]),
    ("backend.name", "[" + "x, " * 500 + "]", ["a list of 500"]),
    ("optimizer.lr", "x" * 500, ['"' + "x" * 50, "..."]),
]


@pytest.mark.parametrize(("name", "value", "parts"), TYPES)
def test_wrong_values_name_setting_place_kind_and_what_is_accepted(
    tmp_path: Path, name: str, value: str, parts: list[str]
) -> None:
    keys = name.split(".")
    model = "" if keys[0] == "model" else MODEL
    others = {"vocab_size": 257, "dim": 32, "layers": 2, "heads": 4}
    if keys[0] == "model":
        others.pop(keys[1], None)
        model = "model:\n" + "".join(f"  {k}: {v}\n" for k, v in others.items())
        text = f"{model}  {keys[1]}: {value}\n"
    else:
        text = model + "".join(f"{'  ' * depth}{key}:\n" for depth, key in enumerate(keys))[:-1] + f" {value}\n"
    (line,) = refused(tmp_path, text)
    assert line.startswith(f"recipe.yaml:{len(text.splitlines())}: {name} ")
    assert len(line) < 330
    for part in parts:
        assert part in line


@pytest.mark.parametrize(("name", "value", "parts"), [case for case in TYPES if case[0] != "model.dim"])
def test_set_gives_the_same_errors(tmp_path: Path, name: str, value: str, parts: list[str]) -> None:
    (line,) = refused(tmp_path, MODEL, f"{name}={value}")
    assert line.startswith(f"--set {name}={value}: {name} ")
    for part in parts:
        assert part in line


def test_what_is_accepted(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        MODEL + "optimizer: {lr: 1, clip_norm: 2, beta1: 0}\n"
        "precision: {compute: bf16, reduce: fp32, params: bfloat16}\n"
        "train: {steps: 0x10, seed: 0o17}\nparallel: {timeout: 5}\n",
    )
    assert (config.optimizer.lr, config.optimizer.clip_norm, config.train.steps, config.train.seed) == (1, 2, 16, 15)
    assert isinstance(config.optimizer.lr, float)
    dtypes = config.precision.model_dump(exclude={"loss_scale", "fp8"})
    assert dtypes == {"compute": "bfloat16", "reduce": "float32", "params": "bfloat16"}
    assert load(tmp_path, "precision: {compute: fp16}\n").precision.compute == "float16"


UNKNOWN = [
    ("optimiser:\n  lr: 1\n", 1, ['unknown key "optimiser" in the recipe', 'did you mean "optimizer"?']),
    ("train:\n  step: 3\n", 2, ['unknown key "step" in train', 'did you mean "steps"?']),
    ("memory:\n  nvme:\n    pth: /x\n", 3, ['unknown key "pth" in memory.nvme', 'did you mean "path"?']),
    ("lr: 1e-3\n", 1, ['unknown key "lr" in the recipe', "did you mean optimizer.lr?"]),
    ("train:\n  lr: 1e-3\n", 2, ['unknown key "lr" in train', "did you mean optimizer.lr?"]),
    ("interval: 5\n", 1, ["did you mean checkpoint.interval or metrics.interval?"]),
    ("foo:\n  bar: 1\n", 1, ['unknown key "foo" in the recipe', "known: backend, model, data"]),
    (MODEL.replace("}", ", hidden: 3}"), 1, ['unknown key "hidden" in model', "known: vocab_size, dim"]),
]


@pytest.mark.parametrize(("text", "line", "parts"), UNKNOWN)
def test_unknown_keys(tmp_path: Path, text: str, line: int, parts: list[str]) -> None:
    (found,) = refused(tmp_path, text)
    assert found.startswith(f"recipe.yaml:{line}: ")
    for part in parts:
        assert part in found


def test_every_problem_is_listed_in_the_order_of_the_file(tmp_path: Path) -> None:
    lines = refused(
        tmp_path,
        "optimizer:\n  lr: -1\n  lr: 2\ntrain:\n  step: 3\n  seq_len: x\n1: 2\nfoo: {}\nmodel: {dim: 0}\n",
        "train.seed=x",
    )
    assert [line.split(": ")[0] for line in lines] == [
        *(f"recipe.yaml:{n}" for n in (2, 3, 5, 6, 7, 8, 9, 9, 9, 9)),
        "--set train.seed=x",
    ]
    missing = [line for line in lines if "is missing" in line]
    assert [line.split()[1] for line in missing] == ["model.vocab_size", "model.layers", "model.heads"]


COMBINATIONS = [
    (
        "optimizer:\n  warmup_steps: 10\ntrain:\n  steps: 10\n",
        2,
        ["optimizer.warmup_steps 10 asked", "train.steps is 10"],
    ),
    ("train:\n  steps: 5\noptimizer:\n  warmup_steps: 9\n", 4, ["warmup_steps 9 asked", "fewer warm-up steps"]),
    ("model:\n  vocab_size: 9\n  dim: 32\n  layers: 1\n  heads: 4\n  kv_heads: 3\n", 6, ["model: heads", "kv_heads=3"]),
    ("model:\n  vocab_size: 9\n  dim: 34\n  layers: 1\n  heads: 4\n", 5, ["model: dim must be", "dim=34, heads=4"]),
]


@pytest.mark.parametrize(("text", "line", "parts"), COMBINATIONS)
def test_combinations(tmp_path: Path, text: str, line: int, parts: list[str]) -> None:
    (found,) = refused(tmp_path, text)
    assert found.startswith(f"recipe.yaml:{line}: ")
    for part in parts:
        assert part in found


# ------------------------------------------------------------------------------------------------------ --set


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.steps", ["no form a.b=c", "--set train.steps=20"]),
        ("=3", ["no form a.b=c"]),
        ("train..steps=3", ["no form a.b=c"]),
        ("train.=3", ["no form a.b=c"]),
        ("", ["no form a.b=c"]),
        ("train.steps.x=3", ["train.steps is integer, no section"]),
        ("train.step=3", ['unknown key "step" in train', 'did you mean "steps"?']),
        ("steps=3", ['unknown key "steps" in the recipe', "did you mean train.steps?"]),
        ("trian.steps=3", ['unknown key "trian" in the recipe', 'did you mean "train"?']),
        ("train=3", ["train asked as 3 (integer)", "a section"]),
        ("backend.ops={attention: [}", ["not valid YAML"]),
        ("backend.ops={a: x, a: y}", ["appears twice"]),
        ("backend.name=!!python/name:os.system", ["backend.name"]),
    ],
)
def test_set_malformed_or_unknown(tmp_path: Path, override: str, parts: list[str]) -> None:
    text = MODEL + "train: {steps: 3}\n"
    if override.startswith("backend.name"):
        # Unquoted text is a scalar, whatever it looks like: it names nothing that could run.
        assert load(tmp_path, text, override).backend.name == override.partition("=")[2]
        return
    (line,) = refused(tmp_path, text, override)
    assert line.startswith("--set ")
    for part in (override, *parts):
        assert part in line


def test_set_values(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        MODEL + "data: {train: here, validation: there}\n",
        "data.train=/data/a #1: b=c",
        "data.validation=",
        "backend.ops={attention: sdpa}",
        "output.dir='5'",
        "optimizer.lr=3e-4",
        "optimizer.clip_norm=null",
        " train . steps = 7 ",
        "model.window=8",
    )
    assert config.data.train == "/data/a #1: b=c"
    assert config.data.validation is None
    assert config.backend.ops == {"attention": "sdpa"}
    assert (config.output.dir, config.optimizer.lr, config.optimizer.clip_norm) == ("5", 3e-4, None)
    assert config.train.steps == 7
    assert config.model is not None
    assert config.model.window == 8


# ----------------------------------------------------------------------------------------------------- places


def test_places_reach_errors_that_are_raised_later(tmp_path: Path) -> None:
    config = load(tmp_path, MODEL + "parallel:\n  tp: 2\n", "train.steps=5")
    places = config.places
    cases = {
        "parallel.tp 2 asked": f"{tmp_path / 'recipe.yaml'}:3: parallel.tp 2 asked",
        "no setting at all": "no setting at all",
        "train.steps 5": "--set train.steps=5: train.steps 5",
        "precision.params, then parallel.tp": f"{tmp_path / 'recipe.yaml'}:3: precision.params, then parallel.tp",
        "parallel.pp 2": f"{tmp_path / 'recipe.yaml'}:2: parallel.pp 2",
        "parallel.tp.deeper, then train.steps": f"{tmp_path / 'recipe.yaml'}:3: parallel.tp.deeper, then train.steps",
    }
    for message, expected in cases.items():
        with pytest.raises(AccelbridgeError) as caught, places.pointing(), places.pointing():
            raise AccelbridgeError(message)
        assert str(caught.value) == expected


def test_places_are_no_part_of_a_config(tmp_path: Path) -> None:
    config = load(tmp_path, "train: {steps: 20}\n")
    assert config == TrainConfig.model_validate({"train": {"steps": 20}})
    assert "places" not in json.dumps(config.model_dump())
    assert Places({("a",): Place("x", 1)}) == Places()


def test_mappings_are_checked_like_files() -> None:
    assert validate({"train": {"steps": 3}}).train.steps == 3
    with pytest.raises(ConfigError, match=r'config: train.steps asked as "x" \(text\); it takes an integer above 0'):
        TrainConfig.of({"train": {"steps": "x"}})
    with pytest.raises(ConfigError, match='unknown key "stepz" in train'):
        TrainConfig.of({"train": {"stepz": 1}})


def test_a_layout_in_words() -> None:
    assert Layout().describe() == "1 device"
    assert Layout(dp_replicate=2).describe() == "dp_replicate 2"
    assert Layout(dp_shard=2, tp=2, zero=1, sequence_parallel=True).describe() == (
        "dp_shard 2 x tp 2, ZeRO 1, sequence parallel"
    )
