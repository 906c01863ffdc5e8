"""coati's KTO trainer: its numbers, counting, files and overridable methods, against its mathematics in plain torch."""

import json
import math
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import published_reference_coati as published
from compat_helpers import PAD, apart, models, optimizer_of, rows_of, weights_of
from published_batches import coati_kto
from tropism.compat.coati import KTOTrainer, clipping
from tropism.errors import UsageError
from tropism.observe.console import Voice

sys.path.append(str(Path(__file__).parents[2] / "examples" / "coming_from"))
from colossalai_stand_ins import Booster, LowLevelZeroPlugin

ARGUMENTS = ("actor ref_model booster actor_optim plugin actor_lr_scheduler tokenizer max_epochs beta desirable_weight "
             "undesirable_weight apply_loss_mask accumulation_steps start_epoch save_interval save_dir coordinator")


def loader_of(count: int, size: int = 3, seed: int = 1) -> DataLoader[Any]:
    """Batches of uneven rows, in another order in each pass; the last one may be smaller."""
    rows = rows_of(count, seed=seed)
    return DataLoader(rows, size, shuffle=True, generator=torch.Generator().manual_seed(seed),  # type: ignore[arg-type]
                      collate_fn=lambda some: coati_kto(some, PAD, "right"))


@pytest.fixture
def make(tiny_model_dir: Path, exact_model_dir: Path, tmp_path: Path, fixture_tokenizer: Any,
         monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A trainer as coati's script makes one, and twins of its objects for the reference."""
    monkeypatch.chdir(tmp_path)

    def go(dtype: torch.dtype = torch.float32, kind: type[KTOTrainer] = KTOTrainer, plugin: Any = None,
           **changes: Any) -> Any:
        directory = exact_model_dir if dtype == torch.float64 else tiny_model_dir
        policy, frozen = models(directory, dtype)
        twin, reference = models(directory, dtype)
        (optimizer, scheduler), theirs = optimizer_of(policy), optimizer_of(twin)
        settings = {"save_dir": tmp_path / "saved", "coordinator": Coordinator(), **changes}
        trainer = kind(policy, frozen, None, optimizer, plugin, scheduler, fixture_tokenizer, voice=Voice(loud=False),
                       store=str(tmp_path / "store"), **settings)
        return SimpleNamespace(trainer=trainer, policy=policy, twin=twin, reference=reference, theirs=theirs,
                               start=weights_of(twin), said=settings["coordinator"].said)

    return go


class Coordinator:
    """Colossalai's, as far as it is used."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def print_on_master(self, msg: str) -> None:
        self.said.append(msg)


class Writer:
    """TensorBoard's."""

    logged: list[tuple[str, float, int]]

    def __init__(self, log_dir: str) -> None:
        Writer.place, Writer.logged = log_dir, []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        Writer.logged.append((name, value, step))

    def close(self) -> None:
        Writer.logged.append(("closed", 0.0, 0))


@pytest.mark.parametrize(("accumulation", "count", "dtype", "bound"), [
    (1, 29, torch.float32, 1e-4), (3, 92, torch.float64, 1e-8),
    pytest.param(1, 29, torch.float64, 1e-8, marks=pytest.mark.slow),
    pytest.param(3, 92, torch.float32, 1e-4, marks=pytest.mark.slow)])
def test_the_weights_are_those_of_the_published_code(
        accumulation: int, count: int, dtype: torch.dtype, bound: float, make: Any, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs of uneven rows, with a smaller last batch; 31 batches an epoch leave one over, which is carried on."""
    made = make(dtype, max_epochs=2, accumulation_steps=accumulation, undesirable_weight=1.33, save_interval=15)
    expected = published.train(made.twin, made.reference, *made.theirs, loader_of(count), epochs=2,
                               accumulation=accumulation, undesirable=1.33)
    fake = ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    result = made.trainer.fit(loader_of(count), loader_of(7, seed=2), tmp_path / "logs", False)
    assert len(expected) == result.steps == 20
    assert apart(made.policy, made.twin, made.start) < bound
    assert Path(Writer.place).parent == tmp_path / "logs" / "kto"
    assert Writer.logged[-1][0] == "closed"
    logged = {(name, step): value for name, value, step in Writer.logged[:-1]}
    assert len(logged) == 100
    records = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    train = [record for record in records if record["split"] == "train"]
    for number, figures in enumerate(expected, start=1):
        for name, value in figures.items():
            if math.isfinite(value):  # NaN if a micro-batch lacks a class, which is left out here
                assert logged[f"train/{name}", number] == pytest.approx(value, rel=2e-3, abs=1e-3)
                assert train[number - 1][f"train/{name}"] == logged[f"train/{name}", number]
    _check_files(made, tmp_path / "saved", accumulation, count)


def _check_files(made: Any, place: Path, accumulation: int, count: int) -> None:
    """Checkpoints at updates after multiples of 15 micro-batches, and the evaluation after each epoch."""
    batches = -(-count // 3)
    done = [number for number in range(15, 2 * batches + 1, 15) if number % accumulation == 0]
    expected = {f"epoch-{(number - 1) // batches}_step-{(number - 1) % batches + 1}" for number in done}
    assert {path.name for path in place.glob("epoch-*")} == expected
    if 2 * batches == 20:  # the same weights as at the last checkpoint but five
        return
    last = place / sorted(expected)[-1]
    states = json.loads((last / "running_states.json").read_text())
    step = int(last.name.split("-")[-1])
    assert states == {"epoch": 1, "step": step, "sample_start_index": 3 * step}
    assert {path.name for path in last.iterdir()} == {"modeling", "optimizer", "lr_scheduler", "running_states.json"}
    assert (weights_of(AutoModelForCausalLM.from_pretrained(last / "modeling", dtype=made.policy.dtype))
            == weights_of(made.policy)).all()
    assert len(torch.load(last / "optimizer")["state"]) == len(list(made.policy.parameters()))
    found = dict(line.split(": ") for line in (place / "eval_result_epoch1.txt").read_text().splitlines()[1:])
    theirs = published.evaluate(made.twin, made.reference, loader_of(7, seed=2), beta=0.1, desirable=1.0,
                                undesirable=1.33)
    assert list(found) == ["loss", "chosen_rewards", "rejected_rewards", "margin"]
    assert float(found["loss"]) == pytest.approx(theirs["loss"], abs=5e-4)
    assert any("Evaluation Result" in text for text in made.said)


class Watched(KTOTrainer):
    """Records the calls of the methods that users override."""

    calls: list[Any]

    def _before_fit(self, *args: Any, **named: Any) -> None:
        self.calls = [("before", *named)]
        super()._before_fit(*args, **named)

    def _train(self, epoch: int) -> None:
        super()._train(epoch)
        self.calls.append(("train", epoch, self.num_train_step, weights_of(self.model)))

    def _eval(self, epoch: int) -> None:
        assert (weights_of(self.model) == self.calls[-1][3]).all()
        self.calls.append(("eval", epoch))
        if self.max_epochs == 4 and epoch == 2:
            raise RuntimeError("of the user")


def test_overridden_methods_act_between_epochs(make: Any, tmp_path: Path) -> None:
    """From `start_epoch` on, each with the weights at the end of its epoch. Their errors end the run."""
    made = make(kind=Watched, max_epochs=3, start_epoch=1, save_dir=None)
    made.trainer.fit(train_preference_dataloader=loader_of(6), log_dir=None)
    calls = made.trainer.calls
    assert [call[:2] for call in calls] == [("before", "train_preference_dataloader"), ("train", 1), ("eval", 1),
                                            ("train", 2), ("eval", 2)]
    assert [call[2] for call in calls if call[0] == "train"] == [2, 4]
    assert (calls[1][3] != calls[3][3]).any()
    made = make(kind=Watched, max_epochs=4, save_dir=None)
    with pytest.raises(RuntimeError, match="of the user"):
        made.trainer.fit(loader_of(6))
    manifest = json.loads((tmp_path / "tropism-run-2" / "manifest.json").read_text())
    assert manifest["status"] == "failed"
    assert made.policy.config._attn_implementation == "sdpa"


class OwnLoop(KTOTrainer):
    """A loop of the user's, with the published attributes."""

    def _train(self, epoch: int) -> None:
        for batch in self.train_dataloader:
            published.micro_batch_loss(self.model, self.ref_model, batch, self.beta, 1.0, 1.0)[0].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.actor_scheduler.step()


def test_an_own_training_loop(make: Any, tmp_path: Path) -> None:
    """Its epochs are evaluated; there is no run to return."""
    made = make(kind=OwnLoop)
    assert made.trainer.fit(loader_of(6), loader_of(3, seed=2)) is None
    published.train(made.twin, made.reference, *made.theirs, loader_of(6), epochs=1, accumulation=1)
    assert apart(made.policy, made.twin, made.start) < 1e-6
    assert "loss: 0." in (tmp_path / "saved" / "eval_result_epoch0.txt").read_text()


def test_what_would_crash_means_off(make: Any, tmp_path: Path) -> None:
    """`save_interval` 0 saves nothing, and without `save_dir` an evaluation is printed only."""
    made = make(save_interval=0)
    made.trainer.fit(loader_of(6))
    assert not [*(tmp_path / "saved").glob("epoch-*"), *(tmp_path / "saved").glob("eval*")]
    assert made.said == ["No eval dataloader is provided, skip evaluation"]
    made = make(save_interval=1, save_dir=None)
    made.trainer.fit(loader_of(6), loader_of(3, seed=2))
    assert [text.split("\n")[0] for text in made.said] == ["Evaluation Result:"]


def test_boosted_objects_are_unwrapped_and_the_plugin_clips(make: Any, tiny_model_dir: Path) -> None:
    """The norm comes from the plugin, or from that of the booster."""
    plugin = LowLevelZeroPlugin(max_norm=0.05)
    made = make(plugin=plugin)
    trainer = made.trainer
    booster = Booster(plugin)
    model, optimizer, _, _, scheduler = booster.boost(trainer.model, trainer.optimizer,
                                                      lr_scheduler=trainer.actor_scheduler)
    boosted = KTOTrainer(model, booster.boost(trainer.ref_model)[0], booster, optimizer, None, scheduler,
                         trainer.tokenizer, voice=Voice(loud=False), store="store")
    boosted.fit(loader_of(12))
    published.train(made.twin, made.reference, *made.theirs, loader_of(12), epochs=1, accumulation=1, max_norm=0.05)
    assert apart(made.policy, made.twin, made.start) < 1e-4
    assert clipping(None, SimpleNamespace(plugin=SimpleNamespace(optim_kwargs={"max_norm": 2.0}))) == 2.0
    assert clipping(SimpleNamespace(max_norm=3), None) == 3.0
    assert clipping(None, None, SimpleNamespace(max_norm=None)) == 0.0


def test_without_the_loss_mask_prompts_are_trained_on(make: Any) -> None:
    """All tokens of a text but the first, with a pad token that is the EOS inside of it; padding never."""
    made = make(apply_loss_mask=False)
    batches = list(loader_of(9))
    for batch in batches:
        for prefix in ("", "kl_"):
            batch[f"{prefix}loss_mask"] = batch[f"{prefix}attention_mask"].long()
    published.train(made.twin, made.reference, *made.theirs, batches, epochs=1, accumulation=1)
    made.trainer.fit(loader_of(9))
    assert apart(made.policy, made.twin, made.start) < 1e-4


class Announced(torch.utils.data.RandomSampler):
    """Counts the calls of set_epoch."""

    seen: tuple[int, ...] = ()

    def set_epoch(self, epoch: int) -> None:
        self.seen += (epoch,)


@pytest.mark.parametrize(("point", "seen"), [("published", ()), ("step", (0, 1))])
def test_the_order_of_rows(point: str, seen: tuple[int, ...], make: Any) -> None:
    """coati never calls `set_epoch`; the step's reference point is not bound to that."""
    rows = rows_of(8)
    sampler = Announced(rows)  # type: ignore[arg-type]
    loader = DataLoader(rows, 4, sampler=sampler, collate_fn=lambda some: coati_kto(some, PAD, "right"))  # type: ignore
    make(max_epochs=2, reference_point=point).trainer.fit(loader)
    assert tuple(dict.fromkeys(sampler.seen)) == seen


def test_the_constructor(make: Any) -> None:
    parameters = signature(KTOTrainer).parameters.values()
    assert [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD] == ARGUMENTS.split()
    with pytest.raises(UsageError, match="start_epoch is 2, and max_epochs is 2"):
        make(start_epoch=2, max_epochs=2)
    with pytest.raises(UsageError, match="train_preference_dataloader is required"):
        make().trainer.fit()
    sources = [*Path("src/tropism/compat").rglob("*.py")]
    assert not [path for path in sources if "import colossalai" in path.read_text()]
