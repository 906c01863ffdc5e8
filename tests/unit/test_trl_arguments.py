"""Arguments of TRL's classes that are taken from older scripts, refused by name, or would change a run silently."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback, TrainingArguments

from tropism.compat import trl as ours
from tropism.compat.trl.options import lora_of, resume_of
from tropism.errors import DataError, OutputExistsError, UsageError

PAIRS = [{"prompt": f"Name {name}.", "chosen": f" {name} is one", "rejected": " none"} for name in "abcdef"]
LABELED = [{"prompt": row["prompt"], "completion": row["chosen"], "label": number % 2 == 0}
           for number, row in enumerate(PAIRS)]
TEXTS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in PAIRS]


def fields(directory: Path, **changes: Any) -> dict[str, Any]:
    return {"output_dir": str(directory / "run"), "per_device_train_batch_size": 2, "max_steps": 1,
            "save_strategy": "no", "tropism_options": {"store": str(directory / "store"), "quiet": True}, **changes}


@pytest.mark.parametrize(("name", "value", "text"), [
    ("warmup_ratio", 0.1, "warmup_steps=0.1"), ("evaluation_strategy", "no", "eval_strategy"),
    ("max_prompt_length", 5, "max_length"), ("rpo_alpha", 1.0, "loss_type="), ("lerning_rate", 1.0, "learning_rate"),
    ("qwxyz", 1, "Remove it")])
@pytest.mark.parametrize("config", [ours.DPOConfig, ours.KTOConfig, ours.SFTConfig, ours.GKDConfig])
def test_fields_of_other_versions_are_refused_with_what_to_use(config: Any, name: str, value: Any, text: str) -> None:
    with pytest.raises(UsageError, match=f"{config.__name__} has no field {name}. .*{text}"):
        config(**{name: value})


@pytest.mark.parametrize(("name", "text"), [("tokenizer", "Use processing_class"), ("beta", "Set it in .*Config"),
                                            ("callback", "Did you mean callbacks")])
@pytest.mark.parametrize("trainer", [ours.DPOTrainer, ours.KTOTrainer, ours.SFTTrainer, ours.GKDTrainer])
def test_arguments_of_other_versions_are_refused_with_what_to_use(trainer: Any, name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"{trainer.__name__} has no argument {name}. {text}"):
        trainer("m", **{name: 1})


def test_numbers_as_text_and_bf16_on_cpus(tmp_path: Path) -> None:
    """YAML reads 1e-4 as a text. transformers computes in bf16 on a CPU only if it is told that it is one."""
    args = ours.DPOConfig(**fields(tmp_path, learning_rate="1e-4", bf16=True))
    assert args.learning_rate == 1e-4
    assert args.bf16
    with pytest.raises(UsageError, match="learning_rate='fast' is not a number"):
        ours.DPOConfig(**fields(tmp_path, learning_rate="fast"))


@pytest.mark.parametrize(("name", "value"), [
    ("bias", "all"), ("init_lora_weights", "pissa"), ("exclude_modules", ["q_proj"]), ("layer_replication", [(0, 1)]),
    ("fan_in_fan_out", True), ("init_lora_weights", False),
    ("rank_pattern", {"q_proj": 2}), ("trainable_token_indices", [1])])
def test_fields_of_an_adapter_are_taken_or_refused(name: str, value: Any) -> None:
    given = {"target_modules": ["q_proj"], "lora_dropout": 0.1, "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 16}
    assert lora_of(LoraConfig(**given), None, "llama") == {"rank": 4, "alpha": 16, "targets": "q_proj"}
    with pytest.raises(UsageError, match=f"peft_config: {name}=.*get_peft_model"):
        lora_of(LoraConfig(**given, **{name: value}), None, "llama")


def test_configs_of_other_trainers(tmp_path: Path, tiny_model_dir: Path) -> None:
    """As in TRL, SFTTrainer takes the arguments of transformers; a config of another trainer is refused."""
    plain = TrainingArguments(output_dir=str(tmp_path / "run"), max_steps=3, use_cpu=True, report_to="none")
    assert ours.SFTTrainer(str(tiny_model_dir), args=plain, train_dataset=TEXTS).args.max_steps == 3
    for trainer, args, wanted in ((ours.DPOTrainer, plain, "DPOConfig"),
                                  (ours.KTOTrainer, ours.DPOConfig(**fields(tmp_path)), "KTOConfig")):
        with pytest.raises(UsageError, match=f"args must be a {wanted}, not {type(args).__name__}"):
            trainer(str(tiny_model_dir), args=args, train_dataset=PAIRS)


def test_evaluations_need_rows_and_models_a_config(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(UsageError, match="eval_strategy='epoch' needs eval_dataset"):
        ours.DPOTrainer(str(tiny_model_dir), args=ours.DPOConfig(**fields(tmp_path, eval_strategy="epoch")),
                        train_dataset=PAIRS)
    with pytest.raises(UsageError, match="not Linear"):
        ours.DPOTrainer(torch.nn.Linear(1, 1), args=ours.DPOConfig(**fields(tmp_path)), train_dataset=PAIRS)


@pytest.mark.parametrize("own", [{}, {"reference_point": "published"}])
def test_kto_of_single_rows_is_refused(tmp_path: Path, tiny_model_dir: Path, own: dict[str, Any]) -> None:
    """Its steps would all be merged into one."""
    args = ours.KTOConfig(**fields(tmp_path, per_device_train_batch_size=1, tropism_options={"quiet": True, **own}))
    with pytest.raises(UsageError, match="a batch has 1 row"):
        ours.KTOTrainer(str(tiny_model_dir), args=args, train_dataset=LABELED)


def test_merged_steps_of_kto_are_announced(tmp_path: Path, tiny_model_dir: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{**row, "prompt": "Name one."} for row in LABELED[:4]] + LABELED[4:]
    args = ours.KTOConfig(**fields(tmp_path, max_steps=-1, num_train_epochs=1, tropism_options={}))
    ours.KTOTrainer(str(tiny_model_dir), args=args, train_dataset=rows)
    assert "3 optimizer steps became 1" in capsys.readouterr().out


@pytest.mark.parametrize(("trainer", "rows", "text"), [
    (ours.DPOTrainer, [*PAIRS, {**PAIRS[0], "chosen": None}], "row 7: a value has the wrong type"),
    (ours.DPOTrainer, [*PAIRS, {"prompt": "a", "chosen": "b"}], "row 7: no column 'rejected'"),
    (ours.DPOTrainer, [*PAIRS, {**PAIRS[0], "prompt": 3}], "row 7: a value has the wrong type"),
    (ours.DPOTrainer, [*PAIRS, "text"], "row 7: a value has the wrong type"),
    (ours.KTOTrainer, [*PAIRS, {"prompt": "a", "chosen": "b"}], "row 7: no column"),
    (ours.KTOTrainer, [*PAIRS, {**PAIRS[0], "rejected": None}], "row 7: a value has the wrong type"),
    (ours.KTOTrainer, [*LABELED, {**LABELED[0], "completion": None}], "row 7: a value has the wrong type"),
    (ours.SFTTrainer, [{"text": "a b"}, {"text": None}], "row 2: a value has the wrong type"),
    (ours.SFTTrainer, [{**TEXTS[0], "images": ["a.png"]}], "column images")])
def test_rows_with_values_of_another_type_are_named(trainer: Any, rows: list[Any], text: str, tmp_path: Path,
                                                    tiny_model_dir: Path) -> None:
    config = getattr(ours, trainer.__name__.replace("Trainer", "Config"))
    with pytest.raises((DataError, UsageError), match=text):
        trainer(str(tiny_model_dir), args=config(**fields(tmp_path)), train_dataset=rows)


def test_an_evaluation_that_a_callback_asks_for_reaches_callbacks(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Without an eval_strategy, too."""
    seen: list[int] = []

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_evaluate = state.global_step == 1

        def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append(state.global_step)

    trainer = ours.SFTTrainer(str(tiny_model_dir), args=ours.SFTConfig(**fields(tmp_path, max_steps=2)),
                              train_dataset=TEXTS, eval_dataset=TEXTS[:2], callbacks=[Asks])
    trainer.train()
    assert seen == [1]
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [1]


def test_where_a_run_is_resumed(tmp_path: Path) -> None:
    """Checkpoints have transformers' names, too."""
    step = tmp_path / "checkpoints" / "step-00000500"
    assert resume_of(str(tmp_path / "checkpoint-500"), tmp_path) == resume_of(step, tmp_path) == str(step)
    assert (resume_of(None, tmp_path), resume_of(True, tmp_path)) == ("never", "auto")
    with pytest.raises(UsageError, match="Set output_dir"):
        resume_of("elsewhere/checkpoint-500", tmp_path)


def test_callbacks_get_the_model_and_an_output_is_kept(tmp_path: Path, tiny_model_dir: Path) -> None:
    seen: list[Any] = []

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seen.append(given["model"])

    def trainer() -> Any:
        return ours.SFTTrainer(str(tiny_model_dir), args=ours.SFTConfig(**fields(tmp_path)), train_dataset=TEXTS,
                               callbacks=[Looks], optimizers=None)

    first = trainer()
    first.train()
    assert seen == [first.model]
    with pytest.raises(OutputExistsError, match=r"Set another output_dir, or resume .*resume_from_checkpoint=True"):
        trainer().train()
