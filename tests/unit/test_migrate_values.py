"""Values that a translation of another trainer's command must keep: losses, adapters, defaults and comments."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tropism.commands.migrate import Translation, migrate

TRL_DPO = "trl dpo --model_name_or_path m --dataset_name d"
OPENRLHF = "openrlhf.cli.train_dpo --pretrain m --dataset d"


def of_yaml(trainer: str, directory: Path, **values: Any) -> Translation:
    file = directory / "train.yaml"
    file.write_text(yaml.safe_dump(values))
    return migrate(trainer, [str(file)])


def kind_of(run: Translation, name: str) -> str:
    return next(line.kind for line in run.account if line.name == name)


def test_the_loss_stays_when_a_weight_of_another_one_is_given(tmp_path: Path) -> None:
    """The option without effect is left out, and accounted for as such."""
    for loss, kept in (("hinge", "hinge"), ("orpo", "orpo"), ("simpo", "simpo")):
        run = of_yaml("llamafactory", tmp_path, stage="dpo", model_name_or_path="m", dataset="d", pref_loss=loss,
                      simpo_gamma=1.0)
        assert run.options["loss"] == kept
        assert ("simpo_gamma" in run.options) == (loss == "simpo")
        assert kind_of(run, "simpo_gamma") == ("taken" if loss == "simpo" else "not supported")


def test_a_bad_value_in_a_file_takes_nothing_else_along(tmp_path: Path) -> None:
    file = tmp_path / "lora.json"
    file.write_text(json.dumps({"r": {"a": 1}, "lora_alpha": 8}))
    run = migrate("coati", [f"train_kto.py --lora_config {file} --lr 1e-5 --max_epochs 2 --seed 7"])
    assert {"learning_rate", "epochs", "seed", "schedule", "weight_decay"} <= run.options.keys()
    assert "lora.rank" not in run.options


def test_ipo_divides_by_lengths_where_theirs_does(tmp_path: Path) -> None:
    assert migrate("trl", [f"{TRL_DPO} --loss_type ipo sft"]).options["loss"] == "ipo_mean,sft"
    assert of_yaml("llamafactory", tmp_path, stage="dpo", pref_loss="ipo").options["loss"] == "ipo_mean"
    assert of_yaml("axolotl", tmp_path, rl="ipo").options["loss"] == "ipo_mean"
    assert migrate("openrlhf", [f"{OPENRLHF} --ipo"]).options["loss"] == "ipo"


@pytest.mark.parametrize(("trainer", "command", "option", "value"), [
    ("openrlhf", f"{OPENRLHF} --lora_rank 64", "lora.alpha", 16), ("openrlhf", OPENRLHF, "lora.alpha", None),
    ("trl", f"{TRL_DPO} --use_peft --lora_r 8", "lora.alpha", 32), ("trl", TRL_DPO, "lora.alpha", None),
    ("trl", f"{TRL_DPO} --eval_strategy epoch", "eval_split", "test"),
    ("trl", f"{TRL_DPO} --eval_strategy epoch --dataset_test_split dev", "eval_split", "dev"),
    ("trl", f"{TRL_DPO} --eval_strategy no", "eval_split", None), ("trl", TRL_DPO, "eval_split", None),
    ("trl", f"{TRL_DPO} --rpo_alpha 0.5", "loss_weights", "1,0.5"),
    ("trl", f"{TRL_DPO} --bf16 false", "precision", "fp32"),
    ("trl", f"{TRL_DPO} --beta", "beta", None), ("trl", f"{TRL_DPO} \\\n --beta 0.3 # or 0.1, don't\n", "beta", "0.3"),
    ("trl", f"{TRL_DPO} --beta 0.3 --output_dir 'a # b'", "output", "a # b"),
    ("trl", f"{TRL_DPO} --output_dir a#b", "output", "a#b"),
    ("trl", "trl sft --model_name_or_path m --dataset_name d --assistant_only_loss", "supervise", "all")])
def test_values(trainer: str, command: str, option: str, value: Any) -> None:
    assert migrate(trainer, [command]).options.get(option) == value


@pytest.mark.parametrize(("beta", "wanted"), [
    ("", {"divergence": "js", "divergence_mix": 0.5}), ("--beta 0", {"divergence": "forward_kl"}),
    ("--beta 1", {"divergence": "reverse_kl"}), ("--beta 0.1", {"divergence": "js", "divergence_mix": 0.1})])
def test_distillation_of_trl(beta: str, wanted: dict[str, Any]) -> None:
    """The divergence alone, at temperature 1."""
    run = migrate("trl", [f"trl gkd --model_name_or_path m --teacher_model_name_or_path t --dataset_name d {beta} "
                          "--temperature 0.9 --lmbda 0"])
    names = ("divergence", "divergence_mix", "kd_weight", "temperature")
    assert {name: run.options[name] for name in names if name in run.options} == {**wanted, "kd_weight": 1.0}


def test_adapters_and_held_out_rows_of_axolotl_and_llama_factory(tmp_path: Path) -> None:
    """lora_target_linear adds every linear layer to those that are named."""
    run = of_yaml("axolotl", tmp_path, base_model="m", adapter="lora", lora_r=8, lora_target_linear=True,
                  lora_target_modules=["q_proj"])
    assert "lora.targets" not in run.options
    run = of_yaml("axolotl", tmp_path, base_model="m", adapter="lora", lora_r=8, lora_target_linear=False,
                  lora_target_modules=["q_proj"])
    assert run.options["lora.targets"] == "q_proj"
    run = of_yaml("llamafactory", tmp_path, stage="sft", finetuning_type="freeze", val_size=500, pure_bf16=True)
    assert (kind_of(run, "finetuning_type"), kind_of(run, "val_size")) == ("not supported", "replaced")
    assert run.options["precision"] == "bf16"


def test_what_a_registry_says_further_is_named(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(
        {"a": {"file_name": "a.json", "num_samples": 5, "subset": "x", "tags": {"role_tag": "r"}, "split": "train"}}))
    run = of_yaml("llamafactory", tmp_path, stage="sft", dataset="a", dataset_dir=str(tmp_path))
    assert any("num_samples, subset, tags of dataset_info.json are not read" in note for note in run.notes)


def test_a_configuration_of_nemo_keeps_its_length_optimizer_and_adapter(tmp_path: Path) -> None:
    run = of_yaml("nemo", tmp_path, model={
        "encoder_seq_length": 4096, "peft": {"peft_scheme": "lora", "lora_tuning": {"adapter_dim": 16}},
        "optim": {"name": "distributed_fused_adam", "sched": {"name": "CosineAnnealing"}}})
    assert (run.options["max_length"], run.options["lora.rank"]) == (4096, 16)
    assert not [line.name for line in run.account if line.kind == "not supported"]
