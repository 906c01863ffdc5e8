"""OpenRLHF's trainers as they are used: arguments, counting, metrics, evaluation, checkpoints, and what is said."""

import copy
import inspect
import io
import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console

import published_reference as published
from compat_helpers import Actor, loader_of, models, optimizer_of, rows_of, strategy_of, weights_of
from published_batches import openrlhf_dpo, openrlhf_kto, openrlhf_sft
from tropism.compat.openrlhf import DPOTrainer, KDTrainer, KTOTrainer
from tropism.errors import ModelError, StoppedEarly, UsageError
from tropism.observe import track
from tropism.observe.console import Voice
from tropism.train import loop


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TROPISM_STORE", str(tmp_path_factory.mktemp("store")))
        yield


def listening(trainer: Any) -> Any:
    """A trainer that speaks into its `.said`."""
    trainer.said = io.StringIO()
    trainer.door.voice = Voice(console=Console(file=trainer.said, width=10_000))
    return trainer


def kto(directory: Path, path: Path, accumulation: int = 2, evaluation: bool = True, epochs: int = 2,
        shuffle: bool = True, **args: Any) -> Any:
    """A KTO trainer over 8 micro-batches of 3 rows."""
    policy, frozen = models(directory)
    strategy = strategy_of(accumulation, ckpt_path=str(path), train_batch_size=3 * accumulation, **args)
    return listening(KTOTrainer(
        Actor(policy), Actor(frozen), strategy, None, *[optimizer_of(policy)[0]],
        loader_of(rows_of(24), openrlhf_kto, shuffle=shuffle),
        loader_of(rows_of(9, seed=1), openrlhf_kto, shuffle=False) if evaluation else None,
        SimpleNamespace(step=lambda: None, state_dict=dict, load_state_dict=lambda state: None), beta=0.3,
        max_epochs=epochs))


def lines_of(result: Any, split: str = "train") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["split"] == split]


@pytest.fixture(scope="module")
def done(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer and the result of its run of 8 updates: evaluated once per epoch, saved every 3."""
    trainer = kto(tiny_model_dir, tmp_path_factory.mktemp("runs") / "kto", save_steps=3)
    trainer.result = trainer.fit(trainer.args, num_update_steps_per_epoch=4)
    return trainer


def test_published_metrics_stand_beside_ours(done: Any) -> None:
    train, evaluated = lines_of(done.result), lines_of(done.result, "eval")
    assert [line["train/global_step"] for line in train] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["eval/global_step"] for line in evaluated] == [0, 4, 8]
    for line in train:
        assert (line["train/kto_loss"], line["train/kl"], line["train/lr"]) == (line["loss"], line["kl"],
                                                                               line["learning_rate"])
        assert line["train/chosen_reward"] == line["rewards/chosen"]
    assert {"eval/eval_loss", "eval/chosen_reward", "eval/reject_reward"} <= evaluated[0].keys()


def test_evaluate_gives_the_published_means(done: Any) -> None:
    """The mean of the micro-batches, each with its own reference point, for the policy as it is."""
    metrics = done.evaluate(done.eval_dataloader, steps=8)
    assert metrics["eval/global_step"] == 8
    wanted = published.evaluate(done.model.model, done.ref_model.model, done.eval_dataloader, published.kto(0.3))
    assert metrics["eval/eval_loss"] == pytest.approx(wanted, rel=1e-5)
    assert metrics["eval/eval_loss"] == pytest.approx(lines_of(done.result, "eval")[-1]["loss"], rel=1e-6)
    assert "evaluation at step 8: eval_loss 0." in done.said.getvalue()


def test_what_follows_openrlhf_is_said_once(done: Any) -> None:
    said = done.said.getvalue()
    assert said.count("steps follow OpenRLHF: KTO's reference point is pooled over each micro-batch") == 1
    assert said.count("reference_point='step'") == 1


def test_checkpoints_are_written_as_asked(done: Any) -> None:
    found = sorted(path.name for path in (done.result.directory / "checkpoints").iterdir())
    assert found == ["step-00000003", "step-00000006", "step-00000008"]


def test_rows_of_one_class_are_trained_and_evaluated(tiny_model_dir: Path, tmp_path: Path) -> None:
    """As in OpenRLHF, where a side may be empty. An evaluation before training changes nothing."""
    policy, frozen = models(tiny_model_dir)
    theirs, rows = copy.deepcopy(policy), [replace(row, label=True) for row in rows_of(12)]
    strategy = strategy_of(2, ckpt_path=str(tmp_path / "run"))
    optimizer, scheduler = optimizer_of(policy)
    trainer = listening(KTOTrainer(policy, frozen, strategy, None, optimizer, loader_of(rows, openrlhf_kto), None,
                                   scheduler, beta=0.3, max_epochs=1))
    metrics = trainer.evaluate(loader_of(rows, openrlhf_kto))
    assert "eval/chosen_reward" in metrics
    assert "eval/reject_reward" not in metrics
    trainer.fit(strategy.args)
    assert "labels: 12 desirable, 0 undesirable" in trainer.said.getvalue()
    published.train(theirs, frozen, *optimizer_of(theirs), [loader_of(rows, openrlhf_kto)], published.kto(0.3),
                    epochs=1, accumulation=2)
    torch.testing.assert_close(weights_of(policy), weights_of(theirs), rtol=0, atol=1e-5)


def test_log_probs_of_a_batch(done: Any) -> None:
    """`compute_model_logps_with_KL` of the Actor and of the model itself."""
    ids, mask, labels, lengths = next(iter(done.eval_dataloader))
    ids, mask = ids.squeeze(1), mask.squeeze(1)
    wanted, counts = published.logps_of(done.model.model, ids, mask, lengths)
    for model in (done.model, done.model.model):
        chosen, rejected, other, aux = done.compute_model_logps_with_KL(model, ids, mask, labels, lengths)
        torch.testing.assert_close(chosen, wanted[:3][labels[:3] == 1])
        torch.testing.assert_close(rejected, wanted[:3][labels[:3] == 0])
        torch.testing.assert_close(other, wanted[3:])
        assert aux == []
        assert chosen.dtype == torch.float32
    logits = done.model.model(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(done._get_batch_logps(logits, ids, mask, True, lengths), wanted / counts)


def test_sides_of_a_batch(tiny_model_dir: Path) -> None:
    """`concatenated_inputs` pads the narrower side; `concatenated_forward` returns sums, and the mean NLL."""
    policy, frozen = models(tiny_model_dir)
    trainer = DPOTrainer(policy, frozen, strategy_of(1), SimpleNamespace(pad_token_id=7), None, [], [], None)
    rows = rows_of(4, 2, seed=3)
    chosen, chosen_mask, rejected, rejected_mask, lengths = openrlhf_dpo(rows, 2, "right")
    sides = [part.squeeze(1) for part in (chosen, chosen_mask, rejected, rejected_mask)]
    ids, masks, doubled = trainer.concatenated_inputs(*sides, lengths)
    assert ids.shape == masks.shape == (8, max(chosen.shape[-1], rejected.shape[-1]))
    assert doubled == lengths * 2
    assert not masks[ids == 7].any()
    first, second, aux, nll = trainer.concatenated_forward(policy, *sides, lengths)
    wanted, counts = published.logps_of(policy, sides[0], sides[1], lengths)
    torch.testing.assert_close(first, wanted)
    torch.testing.assert_close(second, published.logps_of(policy, sides[2], sides[3], lengths)[0])
    torch.testing.assert_close(nll, -(wanted / counts).mean())
    assert aux == []


SIGNATURES = {
    KTOTrainer: "model ref_model strategy tokenizer optim train_dataloader eval_dataloader scheduler max_norm=0.5 "
                "beta=0.01 max_epochs=2 save_hf_ckpt=False disable_ds_ckpt=False",
    DPOTrainer: "model ref_model strategy tokenizer optim train_dataloader eval_dataloader scheduler max_norm=0.5 "
                "beta=0.01 max_epochs=2 save_hf_ckpt=False disable_ds_ckpt=False",
    KDTrainer: "model teacher_model strategy optim train_dataloader eval_dataloader scheduler max_norm=1 "
               "pretrain_mode=False batch_size=1 max_epochs=2 tokenizer=None save_hf_ckpt=False disable_ds_ckpt=False",
}


@pytest.mark.parametrize("kind", SIGNATURES)
def test_constructors_and_methods_are_the_published_ones(kind: Any) -> None:
    def spelled(function: Any) -> str:
        entries = list(inspect.signature(function).parameters.values())
        return " ".join(entry.name if entry.default is entry.empty else f"{entry.name}={entry.default}"
                        for entry in entries if entry.name != "self" and entry.kind is entry.POSITIONAL_OR_KEYWORD)

    assert spelled(kind.__init__) == SIGNATURES[kind]
    assert spelled(kind.fit) == "args consumed_samples=0 num_update_steps_per_epoch=None"
    assert spelled(kind.evaluate) == "eval_dataloader steps=0"
    names = list(inspect.signature(kind.save_logs_and_checkpoints).parameters)[1:]
    assert names == ["args", "global_step", "step_bar", "logs_dict", "client_states"]


@pytest.mark.parametrize(("args", "evaluations", "checkpoints"), [
    ({"eval_steps": math.inf, "save_steps": math.inf}, [], 0),
    ({"eval_steps": 3, "save_steps": -1}, [0, 3, 4], 0),
    ({"eval_steps": -1, "save_steps": 2, "max_ckpt_num": 1}, [0, 2, 4], 1),
])
def test_intervals_mean_what_they_meant(args: dict[str, Any], evaluations: list[int], checkpoints: int,
                                        tiny_model_dir: Path, tmp_path: Path) -> None:
    """-1 evaluates once per epoch, and saves nothing; infinity does neither."""
    trainer = kto(tiny_model_dir, tmp_path / "run", accumulation=4, **args)
    result = trainer.fit(trainer.args)  # without the number of updates per epoch
    assert [line["step"] for line in lines_of(result, "eval")] == evaluations
    folder = result.directory / "checkpoints"
    assert (len(list(folder.iterdir())) if folder.exists() else 0) == checkpoints
    assert lines_of(result)[-1]["step"] == 4


def test_rows_that_were_consumed_are_not_trained_again(tiny_model_dir: Path, tmp_path: Path) -> None:
    """From the middle of an epoch, whose order stays the same; a second fit gets the next free name."""
    trainer = kto(tiny_model_dir, tmp_path / "run", accumulation=3, evaluation=False)
    theirs = copy.deepcopy(trainer.model.model)
    optimizer, scheduler = optimizer_of(theirs)[0], trainer.scheduler
    for name in ("run", "run-2"):
        result = trainer.fit(trainer.args, 27, 2)
        assert result.steps == 2
        assert result.directory.name == name
        published.train(theirs, trainer.ref_model.model, optimizer, scheduler, [loader_of(rows_of(24), openrlhf_kto)],
                        published.kto(0.3), epochs=2, accumulation=3, skip=3)
        optimizer.zero_grad()  # the micro-batch that is left over
        torch.testing.assert_close(weights_of(trainer.model), weights_of(theirs), rtol=0, atol=1e-5)
    trainer.args.train_batch_size = None
    with pytest.raises(UsageError, match=r"consumed_samples 27 requires args\.train_batch_size"):
        trainer.fit(trainer.args, 27)


def test_a_stopped_run_is_resumed_to_the_same_bits(done: Any, tiny_model_dir: Path, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """With load_checkpoint the run at ckpt_path continues; without one there, it starts."""
    real = loop.train_step

    def stopping(engine: Any, work: Any) -> Any:
        if work.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(engine, work)

    trainer = kto(tiny_model_dir, tmp_path / "run", save_steps=3, load_checkpoint=True)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", stopping)
        with pytest.raises(StoppedEarly):
            trainer.fit(trainer.args, num_update_steps_per_epoch=4)
    trainer = kto(tiny_model_dir, tmp_path / "run", save_steps=3, load_checkpoint=True)
    trainer.fit(trainer.args, 24, 4)
    assert torch.equal(weights_of(trainer.model), weights_of(done.model))
    times = ("step_time", "tokens_per_second", "memory/peak_gib")
    ours, theirs = ([{key: value for key, value in line.items() if key not in times} for line in lines_of(one)]
                    for one in (SimpleNamespace(directory=tmp_path / "run"), done.result))
    assert ours == theirs


@pytest.mark.parametrize("place", ["strategy", "args", "nowhere"])
def test_gradients_are_clipped_where_the_strategy_does(place: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """`max_norm` of the constructor is never read; DeepSpeed clips at that of the strategy."""
    policy, frozen = models(tiny_model_dir)
    theirs, limit = copy.deepcopy(policy), 1e-3
    strategy = strategy_of(4, ckpt_path=str(tmp_path / "run"))
    (strategy if place == "strategy" else strategy.args).max_norm = 0.0 if place == "nowhere" else limit
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1)
    KTOTrainer(policy, frozen, strategy, None, optimizer, loader_of(rows_of(24), openrlhf_kto), None, scheduler,
               1e-9, 0.3, 1).fit(strategy.args)
    other = torch.optim.SGD(theirs.parameters(), lr=0.1)
    published.train(theirs, frozen, other, torch.optim.lr_scheduler.ConstantLR(other, 1),
                    [loader_of(rows_of(24), openrlhf_kto)], published.kto(0.3), epochs=1, accumulation=4,
                    max_norm=0 if place == "nowhere" else limit)
    torch.testing.assert_close(weights_of(policy), weights_of(theirs), rtol=0, atol=1e-6)


class Tracker:
    """A tracker that remembers its environment."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append({name: os.environ.get(name) for name in (
            "WANDB_API_KEY", "WANDB_ENTITY", "WANDB_PROJECT", "WANDB_NAME", "WANDB_RUN_GROUP")})

    def start(self) -> None:
        pass

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.seen.append(values)

    def log(self, values: dict[str, Any], step: int) -> None:
        self.seen.append(values)

    def finish(self) -> None:
        pass


def test_a_key_for_wandb_is_never_written(tiny_model_dir: Path, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the environment while the tracker lives, and nowhere else: not in files, records or output."""
    tracking = pytest.importorskip("accelerate.tracking")
    monkeypatch.setattr(tracking, "LOGGER_TYPE_TO_CLASS", {"wandb": Tracker})
    monkeypatch.setattr(track, "_installed", lambda package: True)
    monkeypatch.setattr(Tracker, "seen", [])
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    key = "5ecre7" * 6
    trainer = kto(tiny_model_dir, tmp_path / "run", accumulation=8, save_steps=1, use_wandb=key, wandb_org="us",
                  wandb_project="openrlhf_train_dpo", wandb_run_name="rm_1", wandb_group=None)
    result = trainer.fit(trainer.args)
    assert Tracker.seen[0] == {"WANDB_API_KEY": key, "WANDB_ENTITY": "us", "WANDB_PROJECT": "mine",
                               "WANDB_NAME": "rm_1", "WANDB_RUN_GROUP": None}
    assert "WANDB_API_KEY" not in os.environ
    logged = [values for values in Tracker.seen[2:] if "train/kto_loss" in values]
    assert logged[0]["train/kto_loss"] == logged[0]["train/loss"]
    assert key not in trainer.said.getvalue() + repr(Tracker.seen[1:])
    files = [path for path in result.directory.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if key.encode() in path.read_bytes()]


def test_distillation_of_every_token(tiny_model_dir: Path, tmp_path: Path) -> None:
    """`pretrain_mode` ignores the loss masks, in training and in evaluation; the caller's loader is not changed."""
    policy, teacher = models(tiny_model_dir)
    theirs, rows = copy.deepcopy(policy), rows_of(18)
    strategy = strategy_of(2, kd_coef=0.4, ckpt_path=str(tmp_path / "run"))
    optimizer, scheduler = optimizer_of(policy)
    trainer = listening(KDTrainer(policy, teacher, strategy, optimizer, loader_of(rows, openrlhf_sft), None, scheduler,
                                  pretrain_mode=True, max_epochs=1))
    trainer.fit(strategy.args)
    every = [(ids, mask, torch.ones_like(early)) for ids, mask, early in loader_of(rows, openrlhf_sft)]
    loss = published.kd(0.4)
    published.train(theirs, teacher, *optimizer_of(theirs), [every], loss, epochs=1, accumulation=2)
    torch.testing.assert_close(weights_of(policy), weights_of(theirs), rtol=0, atol=1e-5)
    found = trainer.evaluate(loader_of(rows, openrlhf_sft))
    wanted = published.evaluate(policy, teacher, every, published.kd(0.0))
    assert found["eval/eval gpt_loss"] == pytest.approx(wanted, rel=1e-5)
    assert trainer.said.getvalue().count("one position past the EOS") == 1


def test_logs_and_checkpoints_of_a_loop_of_ones_own(done: Any, tmp_path: Path) -> None:
    args = SimpleNamespace(logging_steps=2, eval_steps=math.inf, save_steps=2, ckpt_path=str(tmp_path))
    before = len(done.said.getvalue())
    for step in (1, 2, 3):
        done.save_logs_and_checkpoints(args, step, None, {"kto_loss": 0.5}, {})
    assert done.said.getvalue()[before:] == "step 2: kto_loss 0.5\n"
    assert [path.name for path in tmp_path.iterdir()] == ["global_step2_hf"]
    args = SimpleNamespace(logging_steps=1, eval_steps=1, save_steps=-1, ckpt_path=str(tmp_path))
    done.save_logs_and_checkpoints(args, 1)
    assert "evaluation at step 1: eval_loss" in done.said.getvalue()[before:]


def test_a_method_that_fit_does_not_call_is_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    class Own(KTOTrainer):
        def save_logs_and_checkpoints(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError

    policy, frozen = models(tiny_model_dir)
    strategy = strategy_of(8, ckpt_path=str(tmp_path / "run"))
    trainer = listening(Own(policy, frozen, strategy, None, *[optimizer_of(policy)[0]],
                            loader_of(rows_of(24), openrlhf_kto), None, None, max_epochs=1))
    trainer.fit(strategy.args)
    assert "fit() does not call save_logs_and_checkpoints" in trainer.said.getvalue()


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"strategy": object()}, UsageError, "strategy is a object without args"),
    ({"model": object()}, ModelError, "model is a object, which holds no transformers model"),
    ({"strategy": strategy_of(1, packing_samples=True)}, UsageError, "args.packing_samples: packed batches"),
    ({"ref_model": torch.nn.Linear(1, 1)}, ModelError, "ref_model is a Linear, which holds no transformers model"),
])
def test_what_cannot_be_trained_is_refused_at_once(changes: dict[str, Any], error: type[Exception], message: str,
                                                   tiny_model_dir: Path) -> None:
    policy, frozen = models(tiny_model_dir)
    given: dict[str, Any] = {"model": policy, "ref_model": frozen, "strategy": strategy_of(1)}
    with pytest.raises(error, match=message):
        DPOTrainer(**{**given, **changes}, tokenizer=None, optim=None, train_dataloader=[], eval_dataloader=[],
                   scheduler=None)


@pytest.fixture
def from_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def go(size: int) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(size))
        for name, value in (("RANK", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
            monkeypatch.setenv(name, value)

    return go


def test_several_processes_are_told_what_replaces_deepspeed(from_rank: Any, tiny_model_dir: Path) -> None:
    """And the number of micro-batches follows from the batch sizes where the strategy does not say it."""
    from_rank(2)
    policy, frozen = models(tiny_model_dir)
    strategy = SimpleNamespace(args=SimpleNamespace(train_batch_size=24, micro_train_batch_size=3))
    trainer = DPOTrainer(policy, frozen, strategy, None, None, [], [], None)
    assert "DeepSpeed is not used. Each process holds the whole model" in trainer.door.notes[-1]
    assert trainer._accumulation() == 4
