"""TRL's trainers, run by ours: their numbers, methods, callbacks and scripts."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    EarlyStoppingCallback,
    TrainerCallback,
    get_cosine_schedule_with_warmup,
)

from trl_data import rows_for
from tropism.compat import trl as ours
from tropism.compat.trl.encode import Rules, encode
from tropism.compat.trl.process import Process
from tropism.errors import UsageError

ROWS = rows_for("dpo", 11)
HELD_OUT = rows_for("dpo", 4, seed=1)


def config(method: str, directory: Path, **changes: Any) -> Any:
    """A small run of 6 steps."""
    own = {"store": str(directory / "store"), "quiet": True, **changes.pop("tropism_options", {})}
    return getattr(ours, f"{method.upper()}Config")(**{
        "output_dir": str(directory / "run"), "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "num_train_epochs": 2, "learning_rate": 1e-3, "logging_steps": 2, "save_strategy": "no",
        "tropism_options": own, **changes})


class Watcher(TrainerCallback):
    """Notes every event, and asks for what it is told."""

    def __init__(self, asks: dict[tuple[str, int], str] | None = None) -> None:
        self.seen: list[tuple[str, int]] = []
        self.asks = asks or {}

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return object.__getattribute__(self, name)

        def note(args: Any, state: Any, control: Any, **given: Any) -> None:
            self.seen.append((name.removeprefix("on_"), state.global_step))
            if wish := self.asks.get((name.removeprefix("on_"), state.global_step)):
                setattr(control, wish, True)
        return note


@pytest.fixture(scope="module")
def run(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trained DPO trainer, with evaluations, checkpoints and a callback."""
    watcher = Watcher()
    directory = tmp_path_factory.mktemp("trl")
    trainer = ours.DPOTrainer(str(tiny_model_dir), args=config(
        "dpo", directory, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
        logging_first_step=True, metric_for_best_model="loss"),
        train_dataset=ROWS, eval_dataset=HELD_OUT, callbacks=[watcher])
    return trainer, trainer.train(), watcher, directory


def test_train_returns_what_transformers_does(run: Any) -> None:
    trainer, output, _, _ = run
    assert output.global_step == trainer.state.global_step == 6
    losses = [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    assert [step for step, _ in losses] == [1, 2, 4, 6]
    weighted = sum(loss * steps for (_, loss), steps in zip(losses, (1, 1, 2, 2), strict=True)) / 6
    assert output.training_loss == pytest.approx(weighted)
    assert output.metrics["epoch"] == pytest.approx(2)


def test_the_history_has_trl_s_names(run: Any) -> None:
    history = run[0].state.log_history
    names = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen",
             "logps/rejected"}
    assert all({*names, "loss", "grad_norm", "learning_rate", "epoch"} <= entry.keys()
               for entry in history if "loss" in entry)
    evaluations = [entry for entry in history if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [3, 6]
    assert all({f"eval_{name}" for name in names} <= entry.keys() for entry in evaluations)
    assert "train_runtime" in history[-1]
    assert run[0].state.best_metric == min(entry["eval_loss"] for entry in evaluations)


def test_callbacks_see_the_events_in_order(run: Any) -> None:
    seen = run[2].seen
    steps = [[("log", 1)], [("log", 2)], [("epoch_end", 3), ("log", 3), ("evaluate", 3), ("save", 3)], [("log", 4)], [],
             [("epoch_end", 6), ("log", 6), ("log", 6), ("evaluate", 6), ("save", 6)]]
    expected = [("init_end", 0), ("train_begin", 0), ("epoch_begin", 0)]
    for number, after in enumerate(steps, start=1):
        expected += [("epoch_begin", 3)] * (number == 4)
        expected += [("step_begin", number - 1), ("step_end", number), *after]
    assert seen[: len(expected)] == expected
    assert seen[len(expected) :][:2] == [("log", 6), ("train_end", 6)]


def test_evaluate_and_predict_take_rows_that_the_reference_has_scored(run: Any) -> None:
    trainer = run[0]
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx([entry for entry in trainer.state.log_history
                                                  if "eval_loss" in entry][1]["eval_loss"])
    assert trainer.evaluate(HELD_OUT, metric_key_prefix="test")["test_loss"] == pytest.approx(metrics["eval_loss"])
    scores = trainer.predict(HELD_OUT[:3])
    assert scores.predictions.shape == (3, 2)
    assert "test_rewards/margins" in scores.metrics
    with pytest.raises(UsageError, match=r"without reference scores.*eval_dataset.*tropism evaluate"):
        trainer.predict(rows_for("dpo", 2, seed=9))


def test_save_model_writes_where_from_pretrained_reads(run: Any, tmp_path: Path) -> None:
    trainer, _, _, directory = run
    trainer.save_model(tmp_path / "saved")
    trainer.save_model()  # into the run directory, as scripts do
    trainer.save_state()
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for other in (AutoModelForCausalLM.from_pretrained(directory / "run"), trainer.model):
        assert all(torch.equal(one, two) for one, two in zip(module.parameters(), other.parameters(), strict=True))
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token_id == trainer.processing_class.eos_token_id
    assert json.loads((directory / "run" / "trainer_state.json").read_text())["global_step"] == 6
    with pytest.raises(UsageError, match="hf upload NAME"):
        trainer.push_to_hub()


def test_a_finished_run_is_resumed_with_its_history(run: Any, tiny_model_dir: Path) -> None:
    trainer, output, _, _ = run
    again = ours.DPOTrainer(str(tiny_model_dir), args=trainer.args, train_dataset=ROWS, eval_dataset=HELD_OUT)
    assert again.train(resume_from_checkpoint=True).training_loss == pytest.approx(output.training_loss)
    assert [entry["step"] for entry in again.state.log_history if "eval_loss" in entry][:2] == [3, 6]


def test_a_run_that_a_callback_stopped_is_saved_where_it_asked(tiny_model_dir: Path, tmp_path: Path) -> None:
    watcher = Watcher({("step_end", 2): "should_save", ("log", 4): "should_training_stop"})
    trainer = ours.DPOTrainer(str(tiny_model_dir), args=config("dpo", tmp_path), train_dataset=ROWS)
    trainer.add_callback(watcher)
    assert trainer.train().global_step == 4
    assert [entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert ("save", 2) in watcher.seen
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    again = ours.DPOTrainer(str(tiny_model_dir), args=trainer.args, train_dataset=ROWS)
    assert again.train(tmp_path / "run").global_step == 4


def test_early_stopping_of_transformers_is_obeyed(tiny_model_dir: Path, tmp_path: Path) -> None:
    trainer = ours.DPOTrainer(
        str(tiny_model_dir), args=config("dpo", tmp_path, eval_strategy="steps", eval_steps=1, max_steps=6,
                                         metric_for_best_model="loss", greater_is_better=True),
        train_dataset=ROWS, eval_dataset=HELD_OUT, callbacks=[EarlyStoppingCallback(1)])
    assert trainer.train().global_step == 2  # the loss falls


class Dies(TrainerCallback):
    """Ends the process after step 5, as far as the run can tell."""

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_a_run_that_died_is_resumed_bit_for_bit(run: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    args = config("dpo", tmp_path, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3,
                  logging_first_step=True)
    given: dict[str, Any] = {"args": args, "train_dataset": ROWS, "eval_dataset": HELD_OUT}
    with pytest.raises(KeyboardInterrupt):
        ours.DPOTrainer(str(tiny_model_dir), callbacks=[Dies()], **given).train()
    again = ours.DPOTrainer(str(tiny_model_dir), **given)
    again.train(resume_from_checkpoint=True)
    assert torch.equal(flat(again.model), flat(run[0].model))
    losses = [[(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
              for trainer in (again, run[0])]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("adapter", [False, True])
def test_the_best_model_is_there_at_the_end(adapter: bool, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Held-out pairs with swapped sides get worse while the others are learned."""
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS[:3]]
    trainer = ours.DPOTrainer(
        str(tiny_model_dir), args=config("dpo", tmp_path, eval_strategy="steps", eval_steps=2, save_strategy="steps",
                                         save_steps=2, load_best_model_at_end=True,
                                         learning_rate=1e-2 if adapter else 2e-3),
        train_dataset=ROWS, eval_dataset=swapped, peft_config=LoraConfig(r=2, lora_alpha=8) if adapter else None)
    trainer.train()
    losses = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    best = min(losses, key=losses.__getitem__)
    assert best == trainer.state.best_global_step < 6
    assert trainer.state.best_model_checkpoint.endswith(f"step-0000000{best}")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[best])
    trainer.save_model(tmp_path / "best")
    saved = "adapter_model.safetensors" if adapter else "model.safetensors"
    last = tmp_path / "run" / "model" / saved
    assert (tmp_path / "best" / saved).read_bytes() != last.read_bytes()


# Numbers

def flat(module: Any) -> torch.Tensor:
    return torch.cat([weight.detach().double().flatten() for weight in module.parameters()])


def logps(module: Any, row: Any, side: int) -> torch.Tensor:
    ids = torch.tensor([[*row.prompt_ids, *row.completions[side].ids]])
    values = module(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
    return values[len(row.prompt_ids) - 1 :].sum()


def test_dpo_is_the_loop_of_transformers_in_plain_torch(tiny_model_dir: Path, tmp_path: Path) -> None:
    """11 rows, micro-batches of 2, two per step: the last micro-batch of an epoch has one row, and counts like the
    others. Order, warmup from rate 0, cosine and AdamW are those of transformers."""
    module, reference, plain = (AutoModelForCausalLM.from_pretrained(tiny_model_dir).double() for _ in range(3))
    rows, _ = encode(ROWS, AutoTokenizer.from_pretrained(tiny_model_dir), Rules("dpo", None), "train_dataset")
    decayed = [weight for weight in plain.parameters() if weight.dim() > 1]
    others = [weight for weight in plain.parameters() if weight.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=1e-3, betas=(0.9, 0.95), eps=1e-6)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 6)
    for epoch in range(2):
        order = torch.randperm(11, generator=torch.Generator().manual_seed(42 + epoch)).tolist()
        micro = [order[start : start + 2] for start in range(0, 11, 2)]
        for step in (micro[start : start + 2] for start in range(0, 6, 2)):
            for batch in step:
                margins = torch.stack([
                    logps(plain, rows[index], 0) - logps(plain, rows[index], 1)
                    - (logps(reference, rows[index], 0) - logps(reference, rows[index], 1)).detach()
                    for index in batch])
                (-torch.nn.functional.logsigmoid(0.1 * margins).mean() / len(step)).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    start = flat(module)
    trainer = ours.DPOTrainer(model=module, args=config(
        "dpo", tmp_path, lr_scheduler_type="cosine", warmup_steps=2, weight_decay=0.1, adam_beta2=0.95,
        adam_epsilon=1e-6, max_length=None, tropism_options={"precision": "fp64"}), train_dataset=ROWS)
    trainer.train()
    assert trainer.model is module
    # Llama's norms compute in float32 in both, on batches of another shape.
    assert (flat(module) - flat(plain)).norm() / (flat(plain) - start).norm() < 1e-7


def test_the_optimizer_of_the_caller_follows_the_schedule_of_the_config(tiny_model_dir: Path, tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    trainer = ours.DPOTrainer(model=module, args=config("dpo", tmp_path, logging_steps=1, max_steps=3),
                              train_dataset=ROWS, optimizers=(torch.optim.SGD(module.parameters(), lr=0.3), None))
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.3, 0.2, 0.1])


@pytest.mark.parametrize("method", ["kto", "sft", "gkd"])
def test_the_other_trainers_learn(method: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"lmbda": 0.0} if method == "gkd" else {}
    more: dict[str, Any] = {"kto": {}, "sft": {"peft_config": LoraConfig(r=2, target_modules=["q_proj"])}, "gkd": {}}
    if method == "gkd":
        teacher = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        with torch.no_grad():
            for weight in teacher.parameters():
                weight.mul_(1.5)
        more["gkd"] = {"teacher_model": teacher}
    trainer = getattr(ours, f"{method.upper()}Trainer")(
        model=str(tiny_model_dir), args=config(method, tmp_path, logging_steps=1, max_steps=4, **changes),
        train_dataset=rows_for(method, 8), **more[method])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] or method == "kto"
    written = {entry.name for entry in (tmp_path / "run" / "model").iterdir()}
    assert ("adapter_model.safetensors" in written) == (method == "sft")


# Refusals

@pytest.mark.parametrize(("method", "arguments", "fields", "text"), [
    ("dpo", {"compute_metrics": print}, {}, "compute_metrics is not supported: logits are never materialized"),
    ("dpo", {"data_collator": print}, {}, "data_collator is not supported"),
    ("sft", {"compute_loss_func": print}, {}, "compute_loss_func is not supported"),
    ("dpo", {"eval_dataset": {"a": [], "b": []}}, {}, r"eval_dataset holds several datasets \(a, b\)"),
    ("dpo", {"train_dataset": iter(ROWS)}, {}, "train_dataset has no length. Set max_steps"),
    ("dpo", {"peft_config": LoraConfig(target_modules="q.*")}, {}, "pattern"),
    ("dpo", {"model": None}, {}, "model is required"),
    ("dpo", {}, {"optim": "adafactor"}, "optim='adafactor' is not supported. Use one of adamw_torch"),
    ("dpo", {}, {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"}, "depend on evaluations"),
    ("dpo", {}, {"train_sampling_strategy": "group_by_length"}, "Use random or sequential"),
    ("dpo", {}, {"max_length": 1}, "no row is left"),
    ("dpo", {}, {"model_init_kwargs": {"revision": "v2"}}, "MODEL@v2"),
    ("dpo", {}, {"model_init_kwargs": {"subfolder": "x"}}, "model_init_kwargs: subfolder is not supported"),
    ("dpo", {}, {"save_strategy": "best"}, "need metric_for_best_model and eval_dataset"),
    ("dpo", {"eval_dataset": ROWS}, {"save_strategy": "best", "metric_for_best_model": "rewards/accuracies",
                                     "greater_is_better": False}, "Set greater_is_better=True"),
    ("dpo", {}, {"tropism_options": {"reference_point": "published"}}, "reference_point must be step"),
    ("dpo", {}, {"tropism_options": {"batch_sise": 3}}, "batch_sise"),
    ("sft", {}, {"packing": True, "packing_strategy": "wrapped"}, "cuts rows in the middle"),
    ("sft", {}, {"loss_type": "dft"}, "loss_type='dft' is not supported"),
    ("gkd", {"teacher_model": "x"}, {}, "lmbda=0.5 is not supported.*Set lmbda=0"),
    ("gkd", {}, {"lmbda": 0.0}, "teacher_model is required"),
])
def test_what_cannot_be_served_is_refused_by_name(method: str, arguments: dict[str, Any], fields: dict[str, Any],
                                                  text: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    given = {"model": str(tiny_model_dir), "train_dataset": rows_for(method, 4), **arguments}
    with pytest.raises(UsageError, match=text):
        getattr(ours, f"{method.upper()}Trainer")(args=config(method, tmp_path, **fields), **given)
    assert not (tmp_path / "run").exists()


def test_the_batch_size_follows_the_processes_unless_it_is_named(
        tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, size in (({}, 8), ({"batch_size": 5}, 5)):
        args = config("dpo", tmp_path, tropism_options=options)
        monkeypatch.setattr(Process, "num_processes", 2)
        trainer = ours.DPOTrainer(str(tiny_model_dir), args=args, train_dataset=ROWS)
        assert trainer._ours.options.batch_size == size
        assert len(trainer._ours.objects.steps.step(1)) == size
        monkeypatch.undo()


# Scripts

def test_arguments_come_from_the_command_line_over_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_FILE", "")
    path = tmp_path / "config.yaml"
    path.write_text("env: {OF_FILE: 1}\nlearning_rate: 0.5\nbeta: 0.2\nlora_r: 4\nuse_peft: true\nload_in_4bit: true\n"
                    "lora_target_modules: [all-linear]\ndatasets: [{path: x, split: train}]\n", encoding="utf-8")
    parser = ours.TrlParser((ours.ScriptArguments, ours.DPOConfig, ours.ModelConfig, ours.DatasetMixtureConfig))
    script, args, model, data = parser.parse_args_and_config([
        "--config", str(path), "--beta", "0.3", "--output_dir", str(tmp_path), "--loss_type", "sigmoid", "sft"])
    assert (args.learning_rate, args.beta, args.loss_type, os.environ["OF_FILE"]) == (0.5, 0.3, ["sigmoid", "sft"], "1")
    assert (script.dataset_train_split, data.datasets[0].path) == ("train", "x")
    lora, quantization = ours.get_peft_config(model), ours.get_quantization_config(model)
    assert lora is not None
    assert (lora.r, lora.target_modules, quantization.load_in_4bit) == (4, "all-linear", True)  # type: ignore[union-attr]
    path.write_text("betta: 1\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"config.yaml: unknown names: --betta"):
        parser.parse_args_and_config(["--config", str(path)])


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model_dir: Path) -> Callable[..., None]:
    """Run a script of the installed TRL with its imports redirected."""
    trl = pytest.importorskip("trl", reason="TRL is not installed, so its scripts cannot be run")
    monkeypatch.setenv("TROPISM_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)

    def go(name: str, *arguments: str) -> None:
        path = Path(trl.__file__).parent / "scripts" / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), "--model_name_or_path", str(tiny_model_dir), *arguments])
        code = path.read_text(encoding="utf-8").replace("from trl import", "from tropism.compat.trl import")
        exec(compile(code, str(path), "exec"), {"__name__": "__main__"})

    return go


@pytest.mark.parametrize("method", ["kto", "dpo", "sft"])
def test_the_scripts_of_trl_run(method: str, script: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for split, count in (("train", 8), ("test", 3)):
        lines = [json.dumps(row) + "\n" for row in rows_for(method, count, seed=count)]
        (tmp_path / "data" / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    script(method, "--dataset_name", str(tmp_path / "data"), "--output_dir", "out", "--max_steps", "3",
           "--per_device_train_batch_size", "2", "--learning_rate", "1e-3", "--eval_strategy", "steps",
           "--eval_steps", "2", "--no_remove_unused_columns", "--dtype", "float32")
    AutoModelForCausalLM.from_pretrained("out")
    assert json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 3


@pytest.mark.parametrize(("method", "changes"), [
    ("dpo", {}), ("dpo", {"loss_type": ["ipo"], "gradient_accumulation_steps": 1}), ("dpo", {"max_length": 60}),
    ("dpo", {"lr_scheduler_type": "cosine", "warmup_steps": 0.3, "dataloader_drop_last": True, "seed": 7}),
    ("sft", {}), ("sft", {"packing": True, "max_length": 300}),
    ("kto", {"tropism_options": {"reference_point": "published"}}), ("kto", {"loss_type": "apo_zero_unpaired"})])
def test_weights_are_those_of_trl(method: str, changes: dict[str, Any], tiny_model_dir: Path, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="TRL is not installed, so its weights cannot be compared")
    datasets = pytest.importorskip("datasets")
    found, own = [], {"adam_epsilon": 1e-6, "report_to": "none", "bf16": False, "seed": 42, **changes}
    start = flat(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    for place in (trl, ours):
        args = config(method, tmp_path / place.__name__, **own)
        if place is trl:
            names = trl.DPOConfig.__dataclass_fields__.keys() | {"packing"}
            theirs = {name: value for name, value in own.items() if name in names}
            args = getattr(trl, f"{method.upper()}Config")(**{
                "output_dir": args.output_dir, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
                "num_train_epochs": 2, "learning_rate": 1e-3, "save_strategy": "no", "use_cpu": True, **theirs})
        trainer = getattr(place, f"{method.upper()}Trainer")(
            model=AutoModelForCausalLM.from_pretrained(tiny_model_dir), args=args,
            processing_class=AutoTokenizer.from_pretrained(tiny_model_dir),
            train_dataset=datasets.Dataset.from_list(rows_for(method, 21)))
        trainer.train()
        found.append(flat(trainer.model))
    assert (found[1] - found[0]).norm() / (found[0] - start).norm() < 1e-4
