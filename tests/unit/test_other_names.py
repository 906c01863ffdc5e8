"""Names and values of other trainers on the command line and in YAML: replaced and said, or explained."""

from pathlib import Path

import pytest

from tropism.argument_names import ALIASES, instead, ours, same_value, value_of
from tropism.cli.app import main
from tropism.cli.arguments import spelled_out
from tropism.cli.other_names import translate
from tropism.cli.usage_errors import known_options
from tropism.config import METHODS, DPOOptions, KTOOptions
from tropism.config_file import read_yaml
from tropism.errors import UsageError, nearest

KTO = set(KTOOptions.flat_fields())


def ours_of(line: str, known: set[str] = KTO) -> tuple[list[str], list[str]]:
    said: list[str] = []
    return translate(["kto", *line.split()], known, said.append)[1:], said


@pytest.mark.parametrize(("typed", "found", "said"), [
    ("--lr 1e-4", "--learning-rate 1e-4", ["--lr is --learning-rate here"]),
    ("--lr=1e-4", "--learning-rate=1e-4", ["--lr is --learning-rate here"]),
    ("--num_train_epochs 3", "--epochs 3", ["--num_train_epochs is --epochs here"]),
    ("--num-train-epochs 3", "--epochs 3", ["--num-train-epochs is --epochs here"]),
    ("--bs 8 --wd .1", "--batch-size 8 --weight-decay .1",
     ["--bs is --batch-size here", "--wd is --weight-decay here"]),
    ("--lora_r 8 --lora-alpha 16", "--lora.rank 8 --lora.alpha 16",
     ["--lora_r is --lora.rank here", "--lora-alpha is --lora.alpha here"]),
    ("--lora.r 8", "--lora.rank 8", ["--lora.r is --lora.rank here"]),
    ("--model_name_or_path m", "--model m", ["--model_name_or_path is --model here"]),
    ("--dataset d --output_dir o", "--data d --output o",
     ["--dataset is --data here", "--output_dir is --output here"]),
    ("--ref_model m", "--reference m", ["--ref_model is --reference here"]),
    ("--use_dora", "--lora.dora", ["--use_dora is --lora.dora here"]),
    ("--optim adamw_torch", "--optimizer adamw",
     ["--optim is --optimizer here", "--optimizer adamw_torch is --optimizer adamw here"]),
    ("--loss_type kto", "--loss kto", ["--loss_type is --loss here"]),
    ("--save_steps -1", "", ["--save_steps is --save-every here"]),
    ("--report_to none", "", ["--report_to is --track here"]),
    ("--learning_rate 1", "--learning_rate 1", []), ("--beta 0.1", "--beta 0.1", []),
    ("--shuffle false --no-strict", "--shuffle false --no-strict", []), ("data --zzz 1", "data --zzz 1", []),
])
def test_names_on_the_command_line(typed: str, found: str, said: list[str]) -> None:
    """H2: translated where our name does not exist; all else is left as it is."""
    assert ours_of(typed) == (found.split(), said)


@pytest.mark.parametrize("pair", ["--lr 1e-4 --learning-rate 1e-5", "--learning_rate=1 --lr 2", "--lr 1 --peak_lr 2"])
def test_two_names_with_two_values(pair: str) -> None:
    with pytest.raises(UsageError, match=r"set the same option\. Pass one of them\."):
        ours_of(pair)


def test_two_names_with_one_value() -> None:
    assert ours_of("--lr 1e-4 --learning-rate 0.0001")[0] == ["--learning-rate", "1e-4"]
    assert same_value("a", "a")
    assert not same_value("1", "a")


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_is_one_of_the_command_line(alias: str) -> None:
    """One table for Python, the command line and YAML."""
    every = {name for options in METHODS.values() for name in options.flat_fields()}
    assert alias not in every
    assert ours(alias.upper().replace("_", "-"), every) == ALIASES[alias]
    assert ours(alias, set()) is None


@pytest.mark.parametrize(("method", "loss", "found"), [
    ("dpo", "dpo", "sigmoid"), ("dpo", "DPO", "sigmoid"), ("dpo", "dpo,nll", "sigmoid,sft"), ("dpo", "slic", "hinge"),
    ("dpo", "exo", "exo_pair"), ("dpo", "nca", "nca_pair"), ("dpo", "sppo", "sppo_hard"), ("dpo", "ipo", "ipo"),
    ("dpo", "simpo", "simpo"), ("dpo", "orpo", "orpo"), ("kto", "kto,cross_entropy", "kto,sft")])
def test_names_of_losses(method: str, loss: str, found: str, tmp_path: Path) -> None:
    """Everywhere: as an option, on the command line and in a file."""
    given = {"model": "m", "data": "d", "output": "o", "loss": loss}
    assert METHODS[method].model_validate(given).loss == found  # type: ignore[attr-defined]
    tokens = translate([method, "--loss", loss], known_options([method]), lambda text: None)
    assert tokens[2] == found
    (tmp_path / "c.yaml").write_text(f"method: {method}\nloss: {loss}\n")
    assert read_yaml(tmp_path / "c.yaml")[1]["loss"] == found


def test_values_of_options() -> None:
    values = {"optimizer": "adamw_torch_fused", "schedule": "constant_with_warmup", "precision": "bfloat16",
              "export_dtype": "bf16", "resume": "true", "f_divergence": "js_divergence"}
    options = DPOOptions.model_validate({"model": "m", "data": "d", "output": "o", **values})
    assert {name: getattr(options, name) for name in values} == {
        "optimizer": "adamw", "schedule": "constant", "precision": "bf16", "export_dtype": "bfloat16",
        "resume": "auto", "f_divergence": "js"}
    assert value_of("optimizer", "adamw_bnb_8bit") == "adamw8bit"
    assert value_of("optimizer", "adafactor") == "adafactor"  # another optimizer: refused
    assert value_of("beta", "dpo") == "dpo"


def test_names_in_a_file(tmp_path: Path) -> None:
    """H2: each with its line; groups too."""
    file, said = tmp_path / "c.yaml", []
    file.write_text("method: dpo\nlr: 1e-4\nloss_type: dpo\nlora:\n  r: 4\n  lora_alpha: 8\nsave_steps: -1\n"
                    "resume_from_checkpoint: true\nreport_to: none\n")
    _, values = read_yaml(file, say=said.append)
    assert values == {"learning_rate": "1e-4", "loss": "sigmoid", "lora.rank": 4, "lora.alpha": 8, "resume": "auto"}
    assert [line.removeprefix(f"{file}:") for line in said] == [
        "2: lr is learning_rate here", "3: loss_type is loss here", "3: loss dpo is sigmoid here",
        "5: lora.r is lora.rank here", "6: lora.lora_alpha is lora.alpha here", "7: save_steps is save_every here",
        "8: resume_from_checkpoint is resume here", "8: resume true is auto here", "9: report_to is track here"]


@pytest.mark.parametrize(("text", "said"), [
    ("lr: 1\nlearning_rate: 2\n", ":3: learning_rate: sets the same option as lr, to another value"),
    ("learning_rate: 2\nlr: 1\n", ":3: lr: sets the same option as learning_rate"),
    ("lr: -1\n", ":2: learning_rate: must be greater"),
    ("lora: {r: 0}\n", ":2: lora.rank: must be greater"),
    ("gradient_accumulation_steps: 2\n", ":2: unknown option gradient_accumulation_steps. --batch-size is"),
    ("zzz: 2\n", ":2: unknown option zzz. See `tropism dpo --help-all`"),
    ("eval_fraction: 0.1\nval_size: 0.2\n", ":3: val_size: sets the same option as eval_fraction"),
    ("val_set_size: 2000\n", ":2: eval_fraction: must be less than 1"),
])
def test_errors_of_a_file(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "c.yaml").write_text(f"method: dpo\n{text}")
    with pytest.raises(UsageError) as error:
        read_yaml(tmp_path / "c.yaml")
    assert f"c.yaml{said}" in str(error.value)


def test_the_command_line_overrides_a_file_under_any_name(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("method: kto\nmodel: m\nlearning_rate: 1\nnum_epochs: 2\n")
    for given in (["train", str(file), "--lr", "3"], ["kto", "--lr", "3", "--config", str(file)]):
        tokens = spelled_out(translate(given, known_options(given), lambda text: None))
        assert [token for token in tokens if "learning" in token or token == "3"] == ["--learning-rate", "3"]
        assert "--epochs=2" in tokens


def refused(capsys: pytest.CaptureFixture[str], method: str, *options: str) -> str:
    assert main([method, "--model", "m", "--data", "d", "--output", "o", *options]) == 2
    return capsys.readouterr().err.splitlines()[-1].removeprefix("tropism: ")


BATCH = "--batch-size is the number of rows of an optimizer step over all devices"


@pytest.mark.parametrize(("option", "said"), [
    *((name, BATCH) for name in (
        "per_device_train_batch_size", "per-device-train-batch-size", "gradient_accumulation_steps", "micro_batch_size",
        "micro_train_batch_size", "train_micro_batch_size_per_gpu", "per_device_batchsize", "grad_accum",
        "gradient_acumulation_steps")),
    ("per_device_eval_batch_size", "An evaluation does not depend on a batch size"), ("warmup_steps", "--warmup-ratio"),
    ("num_warmup_steps", "N / M"), ("bf16", "--precision"), ("load_in_4bit", "--lora.quantize nf4"),
    ("use_peft", "--lora.rank 16"), ("lora_dropout", "Dropout is always 0"), ("save_strategy", "--save-every"),
    ("deepspeed", "torchrun"), ("flash_attn", "--layout"), ("gradient_checkpointing", "--checkpointing"),
    ("prompt_key", "--columns"), ("use_wandb", "--track wandb"), ("overwrite_output_dir", "--resume auto"),
])
def test_options_with_another_meaning_are_explained(capsys: pytest.CaptureFixture[str], option: str, said: str) -> None:
    """H2: never guessed; no name is suggested that means something else."""
    err = refused(capsys, "kto", f"--{option}", "4")
    assert err.startswith(f"unknown option --{option}. ")
    assert said in err
    assert "Did you mean" not in err


@pytest.mark.parametrize(("method", "options", "said"), [
    ("kto", ["--bata", "1"], "unknown option --bata. Did you mean --beta?"),
    ("kto", ["--num_train_epoch", "1"], "Did you mean --epochs?"),
    ("kto", ["--lerning_rate", "1"], "Did you mean --learning-rate?"),
    ("kto", ["--Beta", "1"], "Did you mean --beta?"), ("kto", ["--sede", "1"], "Did you mean --seed?"),
    ("kto", ["--foo", "1"], "See `tropism kto --help-all`"),
    ("kto", ["--steps", "1"], "See `tropism kto --help-all`"),
    ("sft", ["--beta", "1"], "unknown option --beta of `tropism sft`. `tropism kto` and `tropism dpo` have --beta"),
    ("kto", ["--simpo_gamma", "1"], "`tropism dpo` has --simpo-gamma"),
    ("sft", ["--ref_model", "m"], "`tropism kto` and `tropism dpo` have --reference"),
    ("kto", ["--loss", "sigmoid"], "It is a loss of `tropism dpo`, which learns from pairs"),
    ("kto", ["--loss", "ipo"], "It is a loss of `tropism dpo`"), ("kto", ["--loss", "dpo"], "loss of `tropism dpo`"),
    ("dpo", ["--loss", "bco"], "It is a loss of `tropism kto`"),
    ("dpo", ["--loss", "kto"], "`tropism convert --to unpaired`"),
    ("dpo", ["--loss", "kto_pair"], "`tropism convert --to unpaired`"),
    ("kto", ["--loss", "kto_pair"], "`tropism convert --to unpaired`"),
])
def test_hints(capsys: pytest.CaptureFixture[str], method: str, options: list[str], said: str) -> None:
    assert said in refused(capsys, method, *options)


@pytest.mark.parametrize(("name", "known", "found"), [
    ("bata", ["data", "beta"], "beta"), ("data", ["data", "beta"], "data"), ("dop", ["dpo", "kto"], "dpo"),
    ("abc", ["xyz"], None), ("steps", ["stop_delta", "keep"], None), ("", ["a"], None)])
def test_only_what_is_near_is_suggested(name: str, known: list[str], found: str | None) -> None:
    assert nearest(name, known) == found


def test_an_alias_is_suggested_by_our_name() -> None:
    assert instead("logging_step", {"log_every"}, "--{}") == "Did you mean --log-every?"
    assert instead("cutoff_leng", {"beta"}) == ""
