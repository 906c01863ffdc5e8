"""The JSON schema of YAML files: it takes what `tropism train` takes, and finds a wrong name."""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes import RECIPES
from tropism.cli.app import main
from tropism.commands.schema import schema
from tropism.config import METHODS
from tropism.config_file import read_yaml

_TYPES: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list,
                          "object": dict, "null": type(None)}


def fits(value: Any, rule: Any, root: Any) -> bool:
    """Whether a value is valid, by the keywords that the schema uses. Any other keyword is an error."""
    if rule.keys() - {"$schema", "$defs", "title", "description", "default", "type", "enum", "const", "anyOf", "allOf",
                      "if", "then", "$ref", "properties", "required", "additionalProperties", "minimum",
                      "exclusiveMinimum", "maximum", "exclusiveMaximum", "pattern"}:
        raise AssertionError(rule)
    if "$ref" in rule:
        return fits(value, root["$defs"][rule["$ref"].rpartition("/")[2]], root)
    if "if" in rule:
        return not fits(value, rule["if"], root) or fits(value, rule["then"], root)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    checks = [
        "type" not in rule or (isinstance(value, _TYPES[rule["type"]]) and (number or not isinstance(value, bool)
                                                                            or rule["type"] == "boolean")),
        "enum" not in rule or value in rule["enum"], "const" not in rule or value == rule["const"],
        "anyOf" not in rule or any(fits(value, inner, root) for inner in rule["anyOf"]),
        all(fits(value, inner, root) for inner in rule.get("allOf", ())),
        not number or (rule.get("minimum", value) <= value <= rule.get("maximum", value)),
        not number or rule.get("exclusiveMinimum", -1e99) < value < rule.get("exclusiveMaximum", 1e99),
        not isinstance(value, str) or re.search(rule.get("pattern", ""), value) is not None]
    if isinstance(value, dict) and "properties" in rule:
        known = rule["properties"]
        checks += [{*rule.get("required", ())} <= value.keys(),
                   rule.get("additionalProperties", True) is not False or value.keys() <= known.keys(),
                   all(fits(entry, known[name], root) for name, entry in value.items() if name in known)]
    return all(checks)


def valid(text: str, method: str | None = None) -> bool:
    """By the keywords above, and by jsonschema where it is installed: both say the same."""
    values, rule = yaml.safe_load(text), schema(method)
    found = fits(values, rule, rule)
    if importlib.util.find_spec("jsonschema"):
        from jsonschema import Draft7Validator

        Draft7Validator.check_schema(rule)
        assert Draft7Validator(rule).is_valid(values) is found
    return found


@pytest.mark.parametrize("method", METHODS)
def test_every_option_is_described(method: str) -> None:
    """A complete file, as RUN/config.yaml has it, and every option with its text."""
    extra = {"teacher": "t"} if method == "kd" else {}
    text = yaml.safe_dump(METHODS[method](model="m", data="d", output="o", **extra).dump())
    assert valid(text)
    assert valid(text, method)
    options = schema(method)["properties"]
    flat = METHODS[method].flat_fields()
    assert {name.partition(".")[0] for name in flat} | {"method"} == options.keys()
    for name, info in flat.items():
        group, dot, inner = name.rpartition(".")
        own = schema(method)["$defs"][options[group]["$ref"].rpartition("/")[2]]["properties"][inner] if dot else (
            options[name])
        assert own["description"] == info.description


@pytest.mark.parametrize("line", [
    "learning_rte: 1.0e-6", "lora: {rnk: 4}", "epochs: 0", "epochs: one", "schedule: sine", "batch_size: true",
    "learning_rate: fast", "trust_remote_code: true", "evaluator: mine:score", "evaluator: [mine:score]",
    "label_smoothing: 0.1", "parallel: {shard: none}",
    "label_threshold: [1]", "eval_fraction: 1"])
def test_what_a_run_refuses(line: str) -> None:
    assert valid(f"method: kto\nmodel: m\ndata: d\n{line}\n") is False


@pytest.mark.parametrize("line", [
    "learning_rate: 1e-6", "learning_rate: 1", "loss: [kto, sft]", "loss_weights: 1", "columns: {prompt: question}",
    "labels: {up: true, down: null}", "compile: on", "parallel: {shard: off}", "resume: never", "save_every: 1ep",
    "eval_every: 50", "lora: {rank: 4, targets: [q_proj]}", "store_limit: null", "memory_limit: 20GiB",
    "trust_remote_code: false", "evaluator: none", "evaluator: null",
    "chat_template_kwargs: {enable_thinking: false}", "desirable_weight: auto", "desirable_weight: 1.5",
    "overlong: drop"])
def test_the_forms_that_a_run_takes(line: str, tmp_path: Path) -> None:
    text = f"method: kto\nmodel: m\n{line}\n"
    assert valid(text)
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    assert read_yaml(tmp_path / "run.yaml")[0] == "kto"


def test_a_file_names_its_method() -> None:
    assert not valid("model: m\n")
    assert not valid("method: ppo\n")
    assert valid("model: m\n", "kto")
    assert not valid("method: dpo\n", "kto")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes(recipe: Path) -> None:
    text = recipe.read_text(encoding="utf-8")
    assert valid(text)
    assert not valid(f"{text}max_lenght: 100\n")


def test_the_command_prints_it(capfd: pytest.CaptureFixture[str]) -> None:
    """As it is, for all methods and for one."""
    for arguments in ([], ["dpo"]):
        assert main(["schema", *arguments]) == 0
        assert json.loads(capfd.readouterr().out) == schema(*arguments)
    assert main(["schema", "ppo"]) == 2
