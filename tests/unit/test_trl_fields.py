"""The table of TRL's fields is complete: against a frozen list of TRL 1.16, and against what is installed."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from tropism.compat import trl as ours
from tropism.compat.trl.config import CONFIGS, check_refused
from tropism.compat.trl.fields import fields_of, is_off
from tropism.errors import UsageError

FROZEN = json.loads((Path(__file__).parents[1] / "cases" / "trl_fields.json").read_text(encoding="utf-8"))
OWN = {"tropism_options"}
INSTALLED = {entry.name for entry in dataclasses.fields(TrainingArguments)}
NAMES = {"kto": "KTO", "dpo": "DPO", "sft": "SFT", "gkd": "GKD"}


def trl_class(name: str) -> Any:
    """A class of the installed TRL."""
    trl = pytest.importorskip("trl", reason="TRL is not installed, so its own fields cannot be read")
    if name.startswith("GKD"):
        from trl.experimental import gkd
        return getattr(gkd, name)
    return getattr(trl, name)


def default_of(entry: Any) -> Any:
    value = entry.default if entry.default is not dataclasses.MISSING else entry.default_factory()
    return getattr(value, "value", value)


@pytest.mark.parametrize("method", NAMES)
def test_every_field_of_trl_is_in_the_table(method: str) -> None:
    known = {*FROZEN["TrainingArguments"], *FROZEN[f"{NAMES[method]}Config"]}
    assert not known - fields_of(method).keys()


@pytest.mark.parametrize("method", NAMES)
def test_config_classes_have_the_fields_and_defaults_of_trl(method: str) -> None:
    config = CONFIGS[method]
    fields = {entry.name: default_of(entry) for entry in dataclasses.fields(config)}
    theirs = {**FROZEN["TrainingArguments"], **FROZEN[f"{NAMES[method]}Config"]}
    older = FROZEN["TrainingArguments"].keys() - INSTALLED  # an older transformers lacks a few
    assert not theirs.keys() - fields.keys() - older
    assert {name for name in fields.keys() - theirs.keys() if name not in INSTALLED} == OWN
    assert {name: fields[name] for name in FROZEN[f"{NAMES[method]}Config"]} == FROZEN[f"{NAMES[method]}Config"]


def test_every_entry_of_the_table_is_a_field() -> None:
    for method, name in NAMES.items():
        known = {*FROZEN["TrainingArguments"], *FROZEN[f"{name}Config"], *FROZEN["DPOConfig"], *FROZEN["GKDConfig"]}
        assert not fields_of(method).keys() - known


def test_every_field_of_the_installed_transformers_is_in_the_table() -> None:
    assert not INSTALLED - fields_of("dpo").keys()


@pytest.mark.parametrize("method", NAMES)
def test_every_field_of_the_installed_trl_is_in_the_table(method: str) -> None:
    config = trl_class(f"{NAMES[method]}Config")
    assert not {entry.name for entry in dataclasses.fields(config)} - fields_of(method).keys()
    theirs = list(inspect.signature(trl_class(f"{NAMES[method]}Trainer").__init__).parameters)
    assert theirs == list(inspect.signature(getattr(ours, f"{NAMES[method]}Trainer").__init__).parameters)


@pytest.mark.parametrize("method", NAMES)
def test_constructors_have_the_arguments_of_trl_in_its_order(method: str) -> None:
    own = list(inspect.signature(getattr(ours, f"{NAMES[method]}Trainer").__init__).parameters)[1:]
    assert own == FROZEN[f"{NAMES[method]}Trainer"]


VALUES: dict[str, Any] = {"optim_target_modules": ["q"], "label_smoothing_factor": 0.1, "neftune_noise_alpha": 5.0,
                          "eval_delay": 2, "deepspeed": "zero3.json", "pad_token": "<pad>", "optim_args": "a=1",
                          "truncation_mode": "keep_end", "chat_template_path": "template.jinja"}


@pytest.mark.parametrize(("method", "name"), [
    (method, name) for method in NAMES for name, entry in fields_of(method).items()
    if entry.fate == "refused" and name in {item.name for item in dataclasses.fields(CONFIGS[method])}])
def test_refused_fields_are_refused_by_name_before_anything_reads_them(method: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^{name}=.* is not supported: "):
        CONFIGS[method](output_dir=str(tmp_path), **{name: VALUES.get(name, True)})


def test_all_refused_fields_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fp16=True .*\. sync_ref_model=True .*\.$"):
        ours.DPOConfig(output_dir=str(tmp_path), fp16=True, sync_ref_model=True)


def test_defaults_and_values_that_mean_off_are_accepted(tmp_path: Path) -> None:
    for method, config in CONFIGS.items():
        check_refused(config(output_dir=str(tmp_path)), method)
    assert is_off(0.0, 3)
    assert is_off(None, True)
    assert not is_off("keep_end", "keep_start")


def test_without_output_dir_no_run_is_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trainer_output").mkdir()
    assert ours.SFTConfig().output_dir == "trainer_output-2"


def test_trl_s_own_config_is_accepted_by_its_attributes(tmp_path: Path) -> None:
    config = trl_class("DPOConfig")(output_dir=str(tmp_path), bf16=False, sync_ref_model=True)
    with pytest.raises(UsageError, match="sync_ref_model"):
        check_refused(config, "dpo")
