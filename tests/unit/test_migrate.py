"""`tropism migrate`: commands and configurations of other trainers become commands that our parser accepts."""

import json
import random
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tropism.argument_names import PUBLISHED
from tropism.cli.app import main
from tropism.cli.arguments import spelled_out
from tropism.cli.commands import app
from tropism.commands.migrate import TRAINERS, Translation, migrate
from tropism.commands.migrate.report import account, command, quoted
from tropism.config_file import read_yaml
from tropism.errors import UsageError


def options_of(trainer: str, *words: str) -> dict[str, Any]:
    return migrate(trainer, words).options


def accepted(run: Translation) -> None:
    """The parser of our command line takes the printed command."""
    text = "\n".join(command(run))
    words = shlex.split(text.replace("\\\n", " "))
    assert words[0] in ("tropism", "torchrun")
    place = len(words) - 1 - words[::-1].index("tropism")
    parsed = app.parse_args(spelled_out(words[place + 1:]), exit_on_error=False, print_error=False)
    assert parsed[0].__name__ == run.method


def line_of(run: Translation, name: str) -> tuple[str, str]:
    """Kind and text of the account of an option."""
    found = [line for line in run.account if line.name == name]
    assert len(found) == 1, (name, run.account)
    return found[0].kind, found[0].text


SCRIPT = r"""set -x
export WANDB_API_KEY=0123456789abcdef
read -r -d '' training_commands <<EOF
openrlhf.cli.train_kto \
   --save_path ./ckpt/kto --save_steps -1 --eval_steps -1 \
   --train_batch_size 256 --micro_train_batch_size 1 \
   --pretrain org/model --bf16 --max_len 8192 --zero_stage 3 \
   --learning_rate 5e-7 --dataset org/data@sub \
   --input_key instruction --output_key response --label_key score \
   --flash_attn --max_samples 1024 --gradient_checkpointing --use_wandb SECRET
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""


def test_a_script_of_openrlhf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Defaults that differ from ours are written out. A key is not repeated."""
    file = tmp_path / "train.sh"
    file.write_text(SCRIPT)
    run = migrate("openrlhf", [str(file)])
    accepted(run)
    assert run.method == "kto"
    assert run.options == {
        "model": "org/model", "data": "org/data/sub", "output": "./ckpt/kto", "batch_size": 256, "precision": "bf16",
        "max_length": 8192, "learning_rate": "5e-7", "beta": 0.01, "schedule": "cosine_with_min_lr",
        "warmup_ratio": 0.03, "seed": 42, "eval_every": "1ep", "checkpointing": "full", "track": "wandb",
        "columns": "prompt=instruction,completion=response,label=score"}
    assert line_of(run, "micro_train_batch_size")[0] == "without effect"
    assert line_of(run, "max_samples")[0] == "replaced"
    assert next(line for line in run.account if line.name == "beta").default
    assert main(["migrate", "openrlhf", str(file)]) == 0
    out = capsys.readouterr().out
    assert "SECRET" not in out
    assert "0123456789abcdef" not in out
    assert "micro-batch" in out


def test_newer_flags_of_openrlhf() -> None:
    run = migrate("openrlhf", ["deepspeed --num_gpus 8 --module openrlhf.cli.train_dpo --model.beta 0.2 --adam.lr=5e-7 "
                               "--model.model_name_or_path m --data.dataset a,b --ckpt.output_dir out --eval.steps 50 "
                               "--model.nll_loss_coef 0.2 --adam.betas 0.9 0.95 --logger.wandb.key XYZZY "
                               "--train.batch_size 64 --ds.lora.rank 8 --ds.param_dtype bf16 --ds.zero_stage 3"])
    accepted(run)
    assert command(run)[0].startswith("torchrun --nproc-per-node 8 -m tropism dpo")
    wanted = {"beta": "0.2", "learning_rate": "5e-7", "model": "m", "data": "a,b", "output": "out", "eval_every": 50,
              "loss": "sigmoid,sft", "loss_weights": "1,0.2", "batch_size": 64, "lora.rank": 8, "precision": "bf16",
              "track": "wandb", "max_length": 512}
    assert {name: run.options[name] for name in wanted} == wanted
    assert line_of(run, "adam.betas")[0] == "not supported"
    assert "XYZZY" not in repr(run.account)


def test_distillation_of_openrlhf() -> None:
    run = migrate("openrlhf", ["python -m openrlhf.cli.train_kd --pretrain s --teacher_model t --dataset d "
                               "--apply_chat_template --teacher_offload --lora_rank 0"])
    accepted(run)
    assert (run.method, run.options["teacher"], run.options["kd_weight"]) == ("kd", "t", 0.4)
    assert run.options["as_messages"] is True
    assert "lora.rank" not in run.options
    assert any("past the end" in note for note in run.notes)


def test_a_command_of_trl() -> None:
    run = migrate("trl", ["CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes=4 trl/scripts/dpo.py "
                          "--model_name_or_path m --dataset_name d --per_device_train_batch_size 2 "
                          "--gradient_accumulation_steps 8 --loss_type sigmoid sft --loss_weights 1 0.5 "
                          "--eval_strategy steps --eval_steps 50 --save_strategy epoch --save_total_limit 2 "
                          "--use_peft --lora_r 16 --lora_target_modules q_proj v_proj --load_in_4bit "
                          "--no_remove_unused_columns --warmup_ratio 0.05 --bf16 --report_to none --max_steps 200"])
    accepted(run)
    assert run.options == {
        "model": "m", "data": "d", "output": "runs/first", "batch_size": 64, "loss": "sigmoid,sft",
        "loss_weights": "1,0.5", "eval_every": 50, "save_every": "1ep", "keep": 2, "lora.rank": 16,
        "lora.targets": "q_proj,v_proj", "lora.quantize": "nf4", "warmup_ratio": "0.05", "precision": "bf16",
        "max_steps": 200, "epochs": 3, "max_length": 1024, "seed": 42, "lora.alpha": 32, "eval_split": "test"}
    assert line_of(run, "gradient_accumulation_steps") == (
        "replaced", "--batch-size 64: 2 rows x 8 accumulation steps x 4 processes")
    assert line_of(run, "remove_unused_columns")[0] == "without effect"


@pytest.mark.parametrize(("words", "option", "value"), [
    ("--warmup_steps 20 --max_steps 200", "warmup_ratio", 0.1), ("--warmup_steps 0.05", "warmup_ratio", 0.05),
    ("--warmup_steps 20", "warmup_ratio", None), ("", "warmup_ratio", 0.0), ("--warmup_ratio .2", "warmup_ratio", ".2"),
    ("--lr_scheduler_type constant --warmup_ratio .2", "warmup_ratio", 0),
    ("--lr_scheduler_type constant_with_warmup --warmup_ratio .2", "schedule", "constant"),
    ("--lr_scheduler_type cosine_with_restarts", "schedule", None), ("--fp16", "precision", None),
    ("--dtype bfloat16", "precision", "bf16"), ("--eval_steps 0.1 --max_steps 500", "eval_every", 50),
    ("--eval_strategy no", "eval_every", 0), ("--logging_steps 10", "log_every", 10),
    ("--optim adamw_bnb_8bit", "optimizer", "adamw8bit"), ("--optim adafactor", "optimizer", None),
    ("--load_best_model_at_end --metric_for_best_model eval_rewards/auc", "keep_best", "rewards/auc"),
    ("--gradient_checkpointing", "checkpointing", "full"), ("--learning_rate $LR", "learning_rate", None),
    ("--seed 7 --seed 8", "seed", 8), ("--num_train_epochs 1.5", "epochs", None),
    ("--num_train_epochs 2.0", "epochs", 2), ("--trust_remote_code", "trust_remote_code", None),
    ("--beta=0.3", "beta", "0.3"), ("--loss_type kto_pair", "loss", None), ("--lora_r 8", "lora.rank", None)])
def test_options_of_transformers(words: str, option: str, value: Any) -> None:
    """What cannot be said here is left out and accounted for."""
    run = migrate("trl", ["trl", "dpo", "--model_name_or_path", "m", "--dataset_name", "d", *words.split()])
    accepted(run)
    assert run.options.get(option) == value
    for name in re.findall(r"--(\w+)", words):
        assert any(line.name == name for line in run.account)


def test_a_configuration_of_trl(tmp_path: Path) -> None:
    """With options behind it, a mixture of datasets and a redirection. The values of `env` may be secrets."""
    config = tmp_path / "t.yaml"
    config.write_text("model_name_or_path: m\ndatasets:\n  - {path: a/b, split: 'train[:1%]', token: hf_XYZZY}\n"
                      "  - path: c\nlearning_rate: 5.0e-7\nmax_steps: 100\nwarmup_steps: 10\n"
                      "env: {WANDB_API_KEY: XYZZY}\n")
    run = migrate("trl", [f"HF_TOKEN=XYZZY trl kto --config {config} --learning_rate 1e-6 --seed 2 > log 2>&1 &\nls"])
    accepted(run)
    wanted = {"data": "a/b,c", "learning_rate": "1e-6", "warmup_ratio": 0.1, "max_steps": 100, "seed": 2}
    assert {name: run.options[name] for name in wanted} == wanted
    assert "XYZZY" not in "\n".join([*command(run), *account(run)])
    assert migrate("trl", [str(config)]).method == "sft"
    assert migrate("trl", ["accelerate launch mine.py --desirable_weight 2"]).options["desirable_weight"] == "2"


def test_a_configuration_of_llama_factory(tmp_path: Path) -> None:
    """Names of dataset_info.json are read where the file is; options after the configuration count."""
    (tmp_path / "dataset_info.json").write_text(json.dumps({
        "own": {"file_name": "own.json", "columns": {"kto_tag": "label"}}, "hub": {"hf_hub_url": "org/hub"}}))
    config = tmp_path / "kto.yaml"
    config.write_text(f"model_name_or_path: m\nstage: kto\ndataset: own, hub\ndataset_dir: {tmp_path}\nlora_rank: 4\n"
                      "lora_target: all\nlora_dropout: 0.1\ntemplate: qwen\ncutoff_len: 1024\nquantization_bit: 4\n"
                      "kto_chosen_weight: 2\npref_beta: 0.2\nhub_token: hf_0123456789abcdefgh\nbf16: true\n"
                      "ddp_timeout: 1800\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\n"
                      "learning_rate: 1.0e-5\nval_size: 0.1\nresume_from_checkpoint: null\n")
    run = migrate("llamafactory", ["FORCE_TORCHRUN=1", "llamafactory-cli", "train", str(config), "cutoff_len=512"])
    accepted(run)
    wanted = {"data": f"{tmp_path}/own.json,org/hub", "lora.rank": 4, "lora.quantize": "nf4", "max_length": 512,
              "desirable_weight": 2, "beta": 0.2, "batch_size": 8, "eval_fraction": 0.1, "epochs": 3}
    assert {name: run.options[name] for name in wanted} == wanted
    assert line_of(run, "lora_dropout")[0] == "not supported"
    assert any("kto_tag=label" in note for note in run.notes)
    assert "hf_0123456789abcdefgh" not in repr(run.account)
    assert run.given.values == {}
    config.write_text("stage: ppo\n")
    with pytest.raises(UsageError, match="stage ppo: cannot be translated"):
        migrate("llamafactory", [str(config)])


AXOLOTL = """
base_model: m
load_in_4bit: true
rl: {rl}
datasets:
  - path: org/first
    type: llama3.ultra
    split: train
  - {{path: json, data_files: [a.jsonl, b.jsonl], type: chat_template, field_messages: turns}}
adapter: qlora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: adamw_8bit
learning_rate: 0.0002
val_set_size: 0.05
evals_per_epoch: 4
saves_per_epoch: 1
bf16: auto
wandb_project: p
special_tokens: {{pad_token: x}}
deepspeed: z.json
strict: false
unheard_of: 3
"""


@pytest.mark.parametrize(("rl", "method", "loss"), [("kto", "kto", None), ("dpo", "dpo", None),
                                                    ("ipo", "dpo", "ipo_mean"),
                                                    ("null", "sft", None), ("orpo", "dpo", "orpo")])
def test_a_configuration_of_axolotl(rl: str, method: str, loss: str | None, tmp_path: Path) -> None:
    config = tmp_path / "a.yaml"
    config.write_text(AXOLOTL.format(rl=rl))
    run = migrate("axolotl", ["torchrun", "--nproc-per-node", "2", "-m", "axolotl.cli.train", str(config)])
    accepted(run)
    assert (run.method, run.options.get("loss")) == (method, loss)
    wanted = {"data": "org/first,a.jsonl,b.jsonl", "lora.rank": 32, "lora.alpha": 64, "lora.quantize": "nf4",
              "batch_size": 16, "epochs": 2, "eval_every": "0.25ep", "save_every": "1ep", "eval_fraction": 0.05,
              "track": "wandb", "warmup_ratio": 0.03, "schedule": "cosine", "optimizer": "adamw8bit"}
    assert {name: run.options[name] for name in wanted} == wanted
    assert line_of(run, "unheard_of")[0] == "not supported"
    assert any("field_messages is not read" in note for note in run.notes)


def test_the_options_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is read by `tropism train`, and never overwritten."""
    config, written = tmp_path / "a.yaml", tmp_path / "ours.yaml"
    config.write_text(AXOLOTL.format(rl="dpo"))
    assert main(["migrate", "axolotl", "--yaml", str(written), str(config)]) == 0
    assert capsys.readouterr().out.startswith(f"tropism train {written}\n")
    method, values = read_yaml(written)
    assert method == "dpo"
    assert values == dict(migrate("axolotl", [str(config)]).options)
    assert main(["migrate", "axolotl", str(config), f"--yaml={written}"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_commands_of_coati_and_nemo_aligner() -> None:
    run = migrate("coati", ["colossalai run --nproc_per_node 4 train_kto.py --pretrain m --dataset a --save_dir o "
                            "--batch_size 2 --accumulation_steps 8 --save_interval 100 --auto_weight --use_wandb "
                            "--warmup_steps 10 --mixed_precision fp16"])
    accepted(run)
    wanted = {"batch_size": 64, "save_every": 25, "desirable_weight": "auto", "track": "wandb", "weight_decay": 0.1,
              "epochs": 3}
    assert {name: run.options[name] for name in wanted} == wanted
    assert "precision" not in run.options
    run = migrate("nemo", ["python", "train_gpt_kto.py", "trainer.devices=8", "trainer.num_nodes=2",
                           "model.data.data_prefix={train: [a.jsonl], validation: [b.jsonl], test: [c]}",
                           "++model.data.append_eod=True", "exp_manager.max_time_per_run=00:03:30:00",
                           "trainer.kto.val_check_interval=0.25", "model.optim.lr=1e-6"])
    accepted(run)
    wanted = {"data": "a.jsonl", "eval_data": "b.jsonl", "max_time": "12600s", "eval_every": "0.25ep", "beta": 0.2,
              "batch_size": 64, "learning_rate": "1e-6", "seed": 1234}
    assert {name: run.options[name] for name in wanted} == wanted
    assert command(run)[0].startswith("torchrun --nnodes 2 --nproc-per-node 8 -m tropism kto")


@pytest.mark.parametrize("value", ["$(touch x)", "`touch x`", "a'b", 'a"b', "a b", "$HOME/m;touch x", "a\nb\x1b[2J",
                                   "-1", "é", "\\", "!!", "a$", "${X}", "${X:-`id`}", "$X$(id)"])
def test_text_of_others_stays_text(value: str, tmp_path: Path) -> None:
    """A printed command runs nothing but tropism. Only plain variables stay variables."""
    done = subprocess.run(["bash", "-c", f"printf %s {quoted(value)}"], capture_output=True, text=True, check=False,
                          cwd=tmp_path, env={"X": "$X", "HOME": "$HOME", "PATH": "/bin:/usr/bin"})
    assert done.stdout == value.replace("${X}", "$X")
    assert not list(tmp_path.iterdir())


def test_the_output_is_one_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Every line but those of the command is a comment, whatever names and values hold."""
    words = ["trl", "kto", "--model_name_or_path", "m\ntouch x", "--a\ntouch y", "b\x1b[2J\ntouch z", "--beta", "$B"]
    assert main(["migrate", "trl", *words]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    rest = out.partition("\n\n")[2].splitlines()
    assert all(line.startswith("#") or not line for line in rest)
    (tmp_path / "tropism").write_text("#!/bin/sh\nfor word; do printf '%s|' \"$word\"; done\n")
    (tmp_path / "tropism").chmod(0o755)
    done = subprocess.run(["bash", "-c", out], capture_output=True, text=True, check=True, cwd=tmp_path,
                          env={"PATH": f"{tmp_path}:/bin:/usr/bin"})
    assert done.stdout.startswith("kto|--model|m\ntouch x|")
    assert [path.name for path in tmp_path.iterdir()] == ["tropism"]


@pytest.mark.parametrize(("words", "said"), [
    (["trl"], "TRAINER and COMMAND are required"), (["trl", ""], "COMMAND is required"),
    (["trlx", "a"], "unknown trainer trlx. Did you mean trl?"), (["trl", "trl 'kto"], "Check its quotes"),
    (["trl", "trl grpo --beta 1"], "trl grpo: cannot be translated"), (["axolotl", "none.yaml"], "none.yaml"),
    (["llamafactory", "llamafactory-cli train $CFG"], "shell variables are not read"),
    (["llamafactory", "llamafactory-cli export a.yaml"], "export: cannot be translated"),
    (["axolotl", "axolotl preprocess"], "preprocess: cannot be translated"),
    (["openrlhf", "python train_ppo.py --beta 1"], "train_ppo: not a program"), (["trl", "x" * 300_000], "too long"),
    (["trl", "trl kto --config $CONFIG"], "shell variables are not read"), (["trl", "a b", "--yaml"], "needs a file")])
def test_what_cannot_be_translated(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", *words]) == 2
    assert said in capsys.readouterr().err


def test_hostile_configurations(tmp_path: Path) -> None:
    """Nothing is constructed from YAML, and its aliases are limited."""
    file = tmp_path / "c.yaml"
    for text in ("a: !!python/object/apply:os.system ['touch x']", "- a", "a: &a [1, 2]\nb: [*a, *a", "\x00",
                 "a: &a [" + "1," * 200 + "1]\n" + "\n".join(f"b{n}: [*a, *a]" for n in range(60))):
        file.write_text(text)
        with pytest.raises(UsageError, match=r"c\.yaml"):
            migrate("axolotl", [str(file)])
    file.write_text("")
    assert migrate("axolotl", [str(file)]).options["data"] == "DATA"


VALUES = ["1", "0", "-1", "true", "false", "none", "auto", "1e-5", "0.5", "x,y", "$V", "a b", "3d", "", "lora", "nf4",
          "epoch", "steps", "best", "inf", "nan", "-0.1", "10" * 20, "é'\"", "sigmoid", "kto"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_any_options_give_a_valid_command(trainer: str) -> None:
    """Every given option is accounted for once, whatever its value."""
    generator = random.Random(5)
    table = PUBLISHED[{"llamafactory": "llama-factory", "trl": "openrlhf"}.get(trainer, trainer)]
    names = sorted(({name for group in table.values() for name in group.split()} | {
        "warmup_steps", "eval_steps", "save_strategy", "report_to", "per_device_train_batch_size", "max_steps", "bf16",
        "load_best_model_at_end", "metric_for_best_model", "early_stopping_patience", "gradient_accumulation_steps",
        "loss_type", "loss_weights", "use_peft", "save_total_limit", "lr_scheduler_type"}) - {"stage", "rl", "model"})
    program = {"openrlhf": "openrlhf.cli.train_dpo", "trl": "trl kto", "llamafactory": "llamafactory-cli train",
               "axolotl": "axolotl train", "coati": "train_kto.py", "nemo-aligner": "train_gpt_kto.py"}[trainer]
    for _ in range(2):
        chosen = {name: generator.choice(VALUES) for name in generator.sample(names, 40)}
        run = migrate(trainer, [*program.split(), *(f"--{name}={value}" for name, value in chosen.items())])
        accepted(run)
        told = [line.name for line in run.account if not line.default]
        assert sorted(told) == sorted(chosen)
        assert yaml.safe_load(yaml.safe_dump(run.options)) == run.options
