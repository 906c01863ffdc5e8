"""NeMo-Aligner's KTO trainer: its numbers, counting, calls and methods, against its mathematics in plain torch."""

import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import published_reference_nemo as published
from compat_helpers import PAD, apart, models, optimizer_of, rows_of, weights_of
from published_batches import nemo_kto
from tropism.compat.nemo_aligner import KTOTrainer, kto_custom_collate
from tropism.compat.nemo_aligner.settings import Intervals, Timer, batches, read
from tropism.errors import ModelError, UsageError
from tropism.observe.console import Voice

ARGUMENTS = ("cfg model optimizer scheduler train_dataloader val_dataloader test_dataloader logger ckpt_callback "
             "run_timer")


def loader_of(count: int, size: int = 6, seed: int = 1) -> DataLoader[Any]:
    """Global batches of uneven rows, in another order in each pass."""
    rows = rows_of(count, seed=seed)
    return DataLoader(rows, size, shuffle=True, drop_last=True,  # type: ignore[arg-type]
                      generator=torch.Generator().manual_seed(seed), collate_fn=lambda some: nemo_kto(some, PAD, ""))


class Wrapped(torch.nn.Module):
    """NeMo's model class, as far as it is read."""

    def __init__(self, model: Any, tokenizer: Any, **kto: Any) -> None:
        super().__init__()
        self.model, self.tokenizer = model, SimpleNamespace(tokenizer=tokenizer)
        micro = kto.pop("micro", 6)
        self.cfg = {"micro_batch_size": micro, "global_batch_size": 6, "kto": kto}
        self.ref_policy_state_dict: Any = None


class Log:
    """Logger and checkpoint callback: records how they are called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, prefix: str = "") -> None:
        self.calls.append((prefix, step, dict(metrics)))

    def finalize(self) -> None:
        self.calls.append(("finalize",))

    def custom_save(self, monitor_candidates: dict[str, Any], is_train_end: bool = False) -> None:
        assert all(isinstance(value, torch.Tensor) for value in monitor_candidates.values())
        self.calls.append(("save", int(monitor_candidates["step"]), monitor_candidates, is_train_end))

    def of(self, kind: str) -> list[Any]:
        return [call for call in self.calls if call[0] == kind]


@pytest.fixture
def make(tiny_model_dir: Path, exact_model_dir: Path, tmp_path: Path, fixture_tokenizer: Any,
         monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A trainer as NeMo-Aligner's script makes one, and twins of its objects for the reference."""
    monkeypatch.chdir(tmp_path)

    def go(train: Any, dtype: torch.dtype = torch.float32, kind: type[KTOTrainer] = KTOTrainer, validation: Any = None,
           timer: Any = None, kto: Any = None, own_reference: bool = True, **cfg: Any) -> Any:
        directory = exact_model_dir if dtype == torch.float64 else tiny_model_dir
        policy, frozen = models(directory, dtype)
        twin, reference = models(directory, dtype)
        model = Wrapped(policy, fixture_tokenizer, **(kto or {}))
        if own_reference:
            model.ref_policy_state_dict = {f"model.{name}": value for name, value in frozen.state_dict().items()}
        (optimizer, scheduler), theirs = optimizer_of(policy), optimizer_of(twin)
        log = Log()
        trainer = kind({"max_epochs": 1, **cfg}, model, optimizer, scheduler, train, validation, None, log, log, timer,
                       voice=Voice(loud=False), store=str(tmp_path / "store"))
        return SimpleNamespace(trainer=trainer, policy=policy, twin=twin, reference=reference, theirs=theirs, log=log,
                               start=weights_of(twin), model=model)

    return go


@pytest.mark.parametrize(("micro", "average", "dtype", "bound"), [
    (6, False, torch.float32, 1e-4), (2, True, torch.float64, 1e-8),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (2, False, torch.float64, 1e-8), (6, False, torch.float64, 1e-8), (2, False, torch.float32, 1e-4)))])
def test_the_weights_and_metrics_are_those_of_the_published_code(
        micro: int, average: bool, dtype: torch.dtype, bound: float, make: Any) -> None:
    """Two epochs of ten global batches, in one or three micro-batches, clipped; logged, validated and saved."""
    weights = {"undesirable_loss_weight": 1.33, "preference_average_log_probs": average}
    made = make(loader_of(60), dtype, validation=loader_of(20, seed=2), kto={"micro": micro, **weights}, max_epochs=2,
                gradient_clip_val=0.5, val_check_interval=0.5, save_interval=10, limit_val_batches=2)
    settings = {"average": average, "undesirable": 1.33}
    expected = published.train(made.twin, made.reference, *made.theirs, loader_of(60), epochs=2, micro=micro, clip=0.5,
                               **settings)
    result = made.trainer.fit()
    assert len(expected) == made.trainer.step == result.steps == 20
    assert apart(made.policy, made.twin, made.start) < bound
    logged = [(step, metrics) for _, step, metrics in made.log.of("train/")]
    assert [step for step, _ in logged] == list(range(20))
    for number, (figures, (_, metrics)) in enumerate(zip(expected, logged, strict=True)):
        assert metrics.keys() == figures.keys() | {"consumed_samples", "step_time", "epoch"}
        assert (metrics["consumed_samples"], metrics["epoch"]) == (6 * number + 6, number // 10 + 1)
        for name, value in figures.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-4, nan_ok=True), name
    validations = list(loader_of(20, seed=2))[:2]
    theirs = [published.figures(made.twin, made.reference, batch, micro, backward=False, **settings)
              for batch in validations]
    assert [step for _, step, _ in made.log.of("val/")] == [5, 10, 15, 20]
    last = made.log.of("val/")[-1][2]
    for name in theirs[0]:
        assert last[name] == pytest.approx(sum(one[name] for one in theirs) / 2, rel=1e-4, abs=1e-4), name
    assert last["validation_step_time"] > 0
    _check_calls(made, last, result)


def _check_calls(made: Any, last: dict[str, float], result: Any) -> None:
    """The checkpoints, the end, and the published names in metrics.jsonl."""
    assert [(step, end) for _, step, _, end in made.log.of("save")] == [(10, False), (20, True)]
    candidates = made.log.of("save")[-1][2]
    assert float(candidates["val_loss"]) == pytest.approx(last["loss"])
    assert (int(candidates["consumed_samples"]), int(candidates["epoch"])) == (120, 2)
    assert "train_rewards_margin" in candidates
    assert made.log.calls[-1] == ("finalize",)
    records = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["split"] == "train"]
    for record, (_, _, metrics) in zip(train, made.log.of("train/"), strict=True):
        for name in ("loss", "kl", "rewards_all_std", "rewards_margin", "grad_norm", "lr"):
            assert record[f"train/{name}"] == pytest.approx(metrics[name])
    assert records[-1]["val/kl"] == pytest.approx(last["kl"])


def test_rows_without_labels_count_as_zero_rows(make: Any) -> None:
    """An overlong row adds its loss without a gradient, and its pieces to the mismatched rows."""
    loader = list(loader_of(12))
    for batch, rows in zip(loader, ([1], [0, 4]), strict=True):
        batch["sample_labels"][rows] = -100
    made = make(loader, kto={"micro": 3})
    expected = published.train(made.twin, made.reference, *made.theirs, loader, epochs=1, micro=3)
    made.trainer.fit()
    assert apart(made.policy, made.twin, made.start) < 1e-4
    assert made.log.of("train/")[-1][2]["loss"] == pytest.approx(expected[-1]["loss"], abs=1e-5)


class Sampler:
    """Megatron's random batch sampler: the next pass begins where the samples that were consumed end."""

    def __init__(self, total: int, consumed: int) -> None:
        self.total_samples, self.global_batch_size, self.consumed_samples, self.drop_last = total, 6, consumed, True

    def __len__(self) -> int:
        return self.total_samples // 6 - self.consumed_samples % (self.total_samples // 6 * 6) // 6

    def __iter__(self) -> Iterator[list[int]]:
        active = self.total_samples // 6 * 6
        epoch, done = divmod(self.consumed_samples, active)
        order = torch.randperm(self.total_samples, generator=torch.Generator().manual_seed(epoch)).tolist()
        for start in range(done, active, 6):
            self.consumed_samples += 6
            yield order[start : start + 6]


def of_megatron(consumed: int = 0) -> DataLoader[Any]:
    return DataLoader(rows_of(20), batch_sampler=Sampler(20, consumed),  # type: ignore[arg-type]
                      collate_fn=lambda some: nemo_kto(some, PAD, ""))


def test_a_run_continues_at_its_position(make: Any) -> None:
    """Three steps an epoch: five steps, or two and then three from their state, end in the same weights."""
    whole = make(of_megatron(), torch.float64, max_epochs=2, max_steps=5)
    whole.trainer.fit()
    part = make(of_megatron(), torch.float64, max_epochs=2, max_steps=2)
    assert part.trainer.fit().steps == 2
    state = part.trainer.state_dict()
    assert state == {"step": 2, "consumed_samples": 12, "epoch": 0}
    cfg = SimpleNamespace(max_epochs=2, max_steps=5)
    rest = KTOTrainer(cfg, part.model, part.trainer.optimizer, part.trainer.scheduler, of_megatron(12), None, None,
                      part.log, None, None, voice=Voice(loud=False), store="store")
    rest.load_state_dict(state)
    assert (rest.num_steps_per_epoch, rest.max_steps) == (3, 5)
    rest.fit()
    assert apart(part.policy, whole.policy, whole.start) < 1e-12
    assert [metrics["epoch"] for _, _, metrics in part.log.of("train/")] == [1, 1, 1, 2, 2]
    assert [step for _, step, _ in part.log.of("train/")] == [0, 1, 2, 3, 4]
    assert rest.state_dict() == {"step": 5, "consumed_samples": 30, "epoch": 1}
    assert rest.fit() is None


def test_the_time_limit(make: Any) -> None:
    """After the step in which it ends: a validation, a checkpoint, and no finalize."""
    asked: list[int] = []
    timer = SimpleNamespace(start_time=lambda: asked.append(0), is_finished=lambda: asked.append(1) or len(asked) > 2)
    made = make(loader_of(30), validation=loader_of(6, seed=2), timer=timer, val_check_interval=5, save_interval=5)
    result = made.trainer.fit()
    assert [call[0] for call in made.log.calls] == ["train/", "train/", "val/", "save"]
    assert made.log.calls[-1][1::2] == (2, False)
    assert result.steps == 2
    assert asked == [0, 1, 1]


@pytest.mark.parametrize("own", [False, True])
def test_single_steps_outside_of_fit(own: bool, make: Any) -> None:
    """On any batch, with the reference before training or an own one; then fit, which begins anew."""
    made = make(loader_of(12), validation=loader_of(12, seed=2), own_reference=own)
    twin = made.twin
    reference = made.reference if own else models_copy(twin)
    first, second = list(loader_of(12, seed=3))
    for batch in (first, second):
        found = published.figures(twin, reference, batch, 6, backward=True)
        loss, metrics = made.trainer.train_single_step(batch)
        optimizer, scheduler = made.theirs
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        assert loss == pytest.approx(found["loss"], abs=1e-5)
        assert metrics["rewards_all_mean"] == pytest.approx(found["rewards_all_mean"], abs=1e-4)
    assert apart(made.policy, twin, made.start) < 1e-4
    loss, metrics = made.trainer.validation_step(first)
    assert loss == pytest.approx(published.figures(twin, reference, first, 6, backward=False)["loss"], abs=1e-5)
    mean, _ = made.trainer.run_validation()
    _, second_pass = [*(loader := loader_of(12, seed=2))], [*loader]  # the first one began the run
    each = [published.figures(twin, reference, batch, 6, backward=False)["loss"] for batch in second_pass]
    assert mean == pytest.approx(sum(each) / 2, abs=1e-5)
    assert made.trainer.step == 0
    assert made.trainer.fit().steps == 2


def models_copy(model: Any) -> Any:
    import copy

    return copy.deepcopy(model)


def test_other_reference_points(make: Any, tmp_path: Path) -> None:
    """The step's: the result no longer depends on micro-batches; the validation is that of all batches together."""
    found = []
    for micro in (2, 6):
        made = make(loader_of(12), validation=loader_of(12, seed=2), kto={"micro": micro}, val_check_interval=2)
        other = made.trainer
        trainer = KTOTrainer(other.cfg, made.model, other.optimizer, other.scheduler, loader_of(12),
                             loader_of(12, seed=2), None, made.log, None, None, voice=Voice(loud=False), store="store",
                             reference_point="step", output=str(tmp_path / f"own{micro}"))
        assert trainer.fit().directory == tmp_path / f"own{micro}"
        found.append((weights_of(made.policy), made.log.of("val/")[0][2]["loss"]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


class Own(KTOTrainer):
    """Overrides what users override."""

    def augment_dataloader(self, dataloader: Any) -> Iterator[Any]:
        for batch in dataloader:
            yield {**batch, "preference": 1 - batch["preference"]}

    def train_single_step(self, global_batch: Any) -> Any:
        loss, metrics = super().train_single_step(global_batch)
        return loss, {**metrics, "chosen_rows": float(global_batch["preference"].sum())}

    def validation_step(self, global_batch: Any) -> Any:
        return super().validation_step(global_batch)[0], {"loss": 7.0}


def test_overridden_methods_are_called(make: Any) -> None:
    made = make(loader_of(12), kind=Own, validation=loader_of(6, seed=2), val_check_interval=2)
    flipped = [{**batch, "preference": 1 - batch["preference"]} for batch in loader_of(12)]
    published.train(made.twin, made.reference, *made.theirs, flipped, epochs=1, micro=6)
    made.trainer.fit()
    assert apart(made.policy, made.twin, made.start) < 1e-4
    assert [metrics["chosen_rows"] for _, _, metrics in made.log.of("train/")] == [
        float(batch["preference"].sum()) for batch in flipped]
    assert made.log.of("val/")[0][2]["loss"] == 7.0


def test_reference_log_probs_of_a_dataloader(make: Any) -> None:
    made = make(loader_of(6))
    batch = next(iter(made.trainer.augment_dataloader(loader_of(6))))
    for name, labels in (("samples", "sample_labels"), ("kl_samples", "kl_sample_labels")):
        found = batch[f"ref_policy_log_probs_{name}"]
        assert found.shape == (6, batch[name].shape[1] - 1)
        theirs = published.logps_of(made.reference, batch[name], batch[labels], False)
        assert torch.allclose((found * (batch[labels][:, 1:] > -1)).sum(1), theirs, atol=1e-4)


# --- the collate function ---------------------------------------------------------------------------------------------


def item(prompt: list[int], response: list[int], chosen: int, overlong: int = 0) -> dict[str, Any]:
    labels = [-100] * overlong or [-100] * len(prompt) + response
    return {"prompt_tokens": torch.tensor(prompt), "response_tokens": torch.tensor(response),
            "sample_labels": torch.tensor(labels), "sample_length": len(labels), "preference": chosen}


def test_the_collate_function() -> None:
    """Mismatched rows have the next row's response; labels of an overlong row may be longer than its tokens."""
    rows = [item([5, 6], [7, 9], 1), item([8], [10, 11, 9], 0), item([5, 9, 6], [7], 0, overlong=8)]
    batch = kto_custom_collate(rows, 9)
    assert batch["samples"][:, :5].tolist() == [[5, 6, 7, 9, 9], [8, 10, 11, 9, 9], [5, 9, 6, 7, 9]]
    assert batch["kl_samples"][:, :5].tolist() == [[5, 6, 10, 11, 9], [8, 7, 9, 9, 9], [5, 9, 6, 7, 9]]
    assert batch["kl_sample_labels"][:, :5].tolist() == [[-100, -100, 10, 11, 9], [-100, 7, -100, -100, -100],
                                                         [-100, -100, -100, 7, 9]]
    assert (batch["sample_labels"][2] == -100).all()
    assert {part.shape[1] for name, part in batch.items() if "sample" in name and part.ndim == 2} == {8}
    assert batch["preference"].tolist() == [1, 0, 0]
    assert batch["sample_length"].tolist() == [4, 4, 8]
    assert batch["attention_mask"].shape == (3, 1, 8, 8)
    assert batch["attention_mask"][0, 0].tolist() == (torch.ones(8, 8).tril() < 0.5).tolist()
    assert batch["position_ids"][1].tolist() == list(range(8))
    reset = kto_custom_collate(rows, eos_id=9, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    assert reset["position_ids"][2].tolist() == [0, 1, 0, 1, 2, 0, 0, 0]
    assert reset["attention_mask"][2, 0, 3].tolist() == [True, True, False, False, True, True, True, True]
    assert [*signature(kto_custom_collate).parameters] == ["batch", "eos_id", "reset_position_ids",
                                                           "reset_attention_mask", "eod_mask_loss"]


def test_collated_rows_train(make: Any) -> None:
    rows = [item(row.prompt, row.completions[0], int(row.label)) for row in rows_of(12)]
    loader = DataLoader(rows, 6, collate_fn=partial(kto_custom_collate, eos_id=PAD))  # type: ignore[arg-type]
    made = make(loader)
    published.train(made.twin, made.reference, *made.theirs, loader, epochs=1, micro=6)
    made.trainer.fit()
    assert apart(made.policy, made.twin, made.start) < 1e-4


# --- the configuration ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "left"), [(1.0, 10), (0.25, 2), (3, 3), (99, 10), (0, 0), (None, 10), (math.inf, 10),
                                             (0.05, 0)])
def test_limits_of_batches(limit: Any, left: int) -> None:
    assert batches(10, limit, "limit_val_batches") == left


@pytest.mark.parametrize("limit", ["all", -1, -0.5, True, math.nan])
def test_limits_that_mean_nothing(limit: Any) -> None:
    with pytest.raises(UsageError, match="limit_val_batches: must be a share"):
        batches(10, limit, "limit_val_batches")


@pytest.mark.parametrize("shape", [dict, lambda content: SimpleNamespace(**content),
                                   lambda content: SimpleNamespace(get=content.get)])
def test_shapes_of_a_configuration(shape: Any) -> None:
    cfg = shape({"max_epochs": 3, "max_steps": None})
    assert [read(cfg, name, -1) for name in ("max_epochs", "max_steps", "absent")] == [3, -1, -1]


def test_intervals() -> None:
    """A step that saves validates too; 0 is off; the last step and the end of the time count."""
    assert [Intervals(2, 3, 7).after(step, False) for step in (1, 2, 3, 7)] == [
        (False, False, False), (True, False, False), (True, True, False), (True, True, True)]
    assert Intervals(2, 3, 7).after(1, True) == (True, True, False)
    assert Intervals(0, 0, 7).after(7, True) == (False, False, True)


@pytest.mark.parametrize(("interval", "steps"), [(0.5, 2), (0.1, 1), (3, 3), (0, 0), (0.0, 0), (1.0, 5)])
def test_validation_intervals(interval: Any, steps: int, make: Any) -> None:
    """A share of an epoch is at least one step; in NeMo-Aligner a small one turned validation off."""
    trainer = make(loader_of(30), val_check_interval=interval, max_steps=math.inf).trainer
    assert trainer.val_check_interval == steps
    assert trainer.max_steps == 5


def test_the_timer() -> None:
    assert Timer("01:02:03:04").limit == 93784
    timer = Timer("00:00:00:00")
    timer.start_time()
    assert timer.is_finished()
    assert not Timer(None).is_finished()
    assert Timer(None).began <= time.monotonic()
    with pytest.raises(UsageError, match=r"must be DD:HH:MM:SS.*'3h'"):
        Timer("3h")


def test_the_constructor(make: Any) -> None:
    parameters = signature(KTOTrainer).parameters.values()
    assert [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD] == ARGUMENTS.split()
    trainer = make(loader_of(12)).trainer
    options = trainer._door.options
    assert (options["beta"], options["desirable_weight"], options["max_grad_norm"]) == (0.2, 1.0, 0.0)
    with pytest.raises(UsageError, match="train_dataloader has no batch"):
        make(loader_of(4))
    with pytest.raises(ModelError, match="holds no transformers model"):
        KTOTrainer({}, torch.nn.Linear(2, 2), None, None, loader_of(12), None, None, None, None, None)
    with pytest.raises(UsageError, match="no batch to validate on"):
        trainer.run_validation()
    bad = make(loader_of(12)).model
    bad.ref_policy_state_dict = {"other": torch.zeros(1)}
    with pytest.raises(UsageError, match=r"does not fit the model \(first: other\)"):
        KTOTrainer({}, bad, None, None, loader_of(12), None, None, None, None, None)
