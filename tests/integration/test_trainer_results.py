"""What a trainer leaves behind: typed results, a module that generates, models on the way, trackers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from integration.conftest import NOT_RESULTS, records, weights
from integration.test_trainers import equal
from tropism import DPOTrainer, EvalResult, KTOTrainer, RunResult
from tropism import runner as runs
from tropism.errors import OutputExistsError, UsageError
from tropism.observe import track
from tropism.train import observers
from tropism.trainers import Trainer

IDS = torch.tensor([[7, 8, 9]])


# --- results --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_fit_and_evaluate_give_typed_results(method: str, small: Any) -> None:
    """L5: an evaluation before and after training gives the figures that the run records at its first and last step;
    baselines are those of the first evaluation of a run, so they are compared before training only."""
    trainer = small(method, eval_fraction=0.2, samples=2)
    before = trainer.evaluate()
    result = trainer.fit()
    after = trainer.evaluate()
    assert isinstance(result, RunResult)
    assert isinstance(before, EvalResult)
    assert result.steps == 3
    assert result.seconds > 0
    assert result.model == result.directory / "model"
    assert [sample.keys() for sample in result.samples] == [{"id", "held_out", "prompt", "before", "after"}] * 2
    recorded = [{key: value for key, value in record.items() if key not in ("step", "split")}
                for record in records(result) if record["split"] == "eval"]
    assert before.metrics == recorded[0] == result.before
    trained = [{key: value for key, value in metrics.items() if not key.startswith("baselines/")}
               for metrics in (after.metrics, recorded[-1], result.after)]
    assert trained[0] == trained[1] == trained[2]
    assert after["loss"] == after.metrics["loss"] != before["loss"]
    assert before.rows == after.rows == json.loads((result.directory / "audit.json").read_text())["split"]["eval"]
    with pytest.raises(KeyError):
        after["no such figure"]


def test_without_held_out_rows(small: Any) -> None:
    """The first and last train record stand for the evaluation; asking for one is an error that says what to give."""
    trainer = small("dpo")
    with pytest.raises(UsageError, match="eval_dataset or eval_fraction"):
        trainer.evaluate()
    result = trainer.fit()
    first, *_, last = records(result)
    assert {**result.before, "step": 1, "split": "train"} == first
    assert {**result.after, "step": 3, "split": "train"} == last


def test_an_evaluation_first_changes_nothing(small: Any) -> None:
    plain, asked = small("kto", eval_fraction=0.2), small("kto", eval_fraction=0.2)
    asked.evaluate()
    assert equal(weights(asked.fit().model), weights(plain.fit().model))


def test_a_trainer_trains_once(small: Any, module: Any) -> None:
    """To go on, a new trainer takes the module as it is now; its reference is that module too."""
    trainer = small("dpo", module)
    first = trainer.fit()
    with pytest.raises(UsageError, match="has already trained"):
        trainer.fit()
    second = small("dpo", module).fit()
    assert second.before["rewards/margins"] == pytest.approx(0.0, abs=1e-4)
    assert equal(weights(small("dpo", first.model).fit().model), weights(second.model))


def test_where_a_run_goes_by_default(small: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No run overwrites another: the next free name is taken; a place that is used is refused."""
    monkeypatch.chdir(tmp_path)
    names = [small("dpo", output=None, max_steps=1).fit().directory for _ in range(2)]
    assert names == [Path("tropism-run"), Path("tropism-run-2")]
    assert all((tmp_path / name / "model" / "config.json").is_file() for name in names)
    with pytest.raises(OutputExistsError, match="tropism-run-3"):
        small("dpo", output="tropism-run").fit()


@pytest.mark.parametrize("kind", [KTOTrainer, DPOTrainer])
def test_the_run_directory_is_a_run_of_the_command_line(kind: type[Trainer], small: Any, data_of: dict[str, Path],
                                                        ) -> None:
    """config.yaml has our names, whatever they were called here."""
    method = kind.options_class.method
    result = small(method, max_norm=0.5, logging_steps=2).fit()
    config = yaml.safe_load((result.directory / "config.yaml").read_text())
    assert (config["method"], config["max_grad_norm"], config["log_every"]) == (method, 0.5, 2)
    assert config["data"] == str(data_of[method])
    assert not {"max_norm", "logging_steps", "train_dataset"} & config.keys()


# --- the module afterwards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_module_generates_and_is_evaluated_again(attention: str, small: Any, tiny_model_dir: Path) -> None:
    """Its own attention is given back after each call, and what generation did changes no figure."""
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation=attention)
    trainer = small("kto", module, eval_fraction=0.2)
    at_first = module.generate(IDS, max_new_tokens=4, do_sample=False)
    before = trainer.evaluate()
    assert torch.equal(module.generate(IDS, max_new_tokens=4, do_sample=False), at_first)
    assert trainer.evaluate().metrics == before.metrics
    result = trainer.fit()
    after = trainer.evaluate()
    assert module.config._attn_implementation == attention
    answer = module.generate(IDS, max_new_tokens=4, do_sample=False)
    loaded = AutoModelForCausalLM.from_pretrained(result.model, attn_implementation=attention)
    assert torch.equal(loaded.generate(IDS, max_new_tokens=4, do_sample=False), answer)
    assert trainer.evaluate()["loss"] == after["loss"]


def test_a_module_generates_after_a_run_that_failed(small: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("in the middle of it")

    monkeypatch.setattr("tropism.train.loop.train_step", broken)
    with pytest.raises(RuntimeError, match="in the middle"):
        small("dpo", module).fit()
    assert module.generate(IDS, max_new_tokens=2).shape[0] == 1


# --- models on the way ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["save_interval", "save_steps", "save_every"])
def test_models_that_are_kept_on_the_way(name: str, small: Any) -> None:
    """S1: every second step leaves a complete model, as good as a run that ends there; the last is RUN/model."""
    model = {"checkpoint_model": True} if name == "save_every" else {}  # the other names mean it
    result = small("dpo", max_steps=4, schedule="constant", warmup_ratio=0.0, **{name: 2}, **model).fit()
    place = result.directory / "checkpoints"
    assert sorted(path.name for path in place.iterdir()) == ["step-00000002", "step-00000004"]
    assert (place / "step-00000002" / "COMPLETE").is_file()
    kept = place / "step-00000002" / "model"
    shorter = small("dpo", max_steps=2, schedule="constant", warmup_ratio=0.0).fit()
    assert equal(weights(kept), weights(shorter.model))
    assert not equal(weights(kept), weights(result.model))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(kept), AutoTokenizer.from_pretrained(kept)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generate(IDS, max_new_tokens=2).shape[0] == 1
    assert not (shorter.directory / "checkpoints").exists()


# --- trackers -------------------------------------------------------------------------------------------------------


class Watched:
    """Stands in for `Trackers`, and remembers what it was asked for."""

    made: Any = None

    def __init__(self, names: list[str], run_name: str, directory: Path, config: dict[str, Any], warn: Any) -> None:
        Watched.made = self
        self.names, self.run_name, self.directory, self.config = names, run_name, directory, config
        self.lines: list[tuple[str, int, dict[str, float]]] = []
        self.finished = 0

    def log(self, record: dict[str, float], step: int, split: str, others: dict[str, float]) -> None:
        self.lines.append((split, step, dict(record)))

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize(("changes", "names"), [
    ({"use_wandb": True}, ["wandb"]), ({"track": "tensorboard", "use_wandb": True}, ["tensorboard", "wandb"]),
    ({"track": ["trackio"]}, ["trackio"]), ({"track": "wandb", "use_wandb": True}, ["wandb"])])
def test_trackers_get_every_record(changes: dict[str, Any], names: list[str], small: Any, tmp_path: Path,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of metrics.jsonl, under the run's name, in `log_dir` or in the run."""
    monkeypatch.setattr(observers, "Trackers", Watched)
    monkeypatch.setattr(runs, "check_trackers", lambda names: None)
    log_dir = {"log_dir": str(tmp_path / "elsewhere")} if "track" not in changes else {}
    result = small("kto", eval_fraction=0.2, eval_steps=2, **changes, **log_dir).fit()
    seen = Watched.made
    assert seen.names == names
    assert seen.run_name == result.directory.name
    assert seen.directory == (tmp_path / "elsewhere" if log_dir else result.directory / "logs")
    assert seen.config["learning_rate"] == 1e-3
    assert [{"split": split, "step": step, **record} for split, step, record in seen.lines] == records(result)
    assert seen.finished == 1


def test_no_tracker_is_asked_unless_one_is_named(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """H4: not even where its package is installed."""
    Watched.made = None
    monkeypatch.setattr(observers, "Trackers", Watched)
    small("dpo", use_wandb=False).fit()
    assert Watched.made is None
    with pytest.raises(UsageError, match="unknown tracker 'wandbb'"):
        small("dpo", track="wandbb").fit()


@pytest.mark.parametrize("fails", ["start", "log", "finish"])
def test_a_tracker_that_fails_never_stops_training(fails: str, small: Any, monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """H4: one warning; weights and metrics.jsonl are those of a run without trackers."""
    class Failing:
        name = "failing"

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.logged = 0

        def start(self) -> None:
            self.fail("start")

        def store_init_configuration(self, values: dict[str, Any]) -> None: ...

        def log(self, values: dict[str, Any], step: int) -> None:
            self.logged += 1
            if self.logged == 2:
                self.fail("log")

        def finish(self) -> None:
            self.fail("finish")

        @staticmethod
        def fail(where: str) -> None:
            if where == fails:
                raise ConnectionError("no route to host")

    monkeypatch.setattr(track, "_others", lambda: {"failing": None})
    monkeypatch.setattr(track, "_class", lambda name: Failing)
    result = small("dpo", track="failing", voice=None).fit()
    said = capsys.readouterr().out
    assert said.count("tracker 'failing'") == said.count("no route to host") == 1
    plain = small("dpo").fit()
    assert equal(weights(result.model), weights(plain.model))
    ours, theirs = ([{key: value for key, value in record.items() if key not in NOT_RESULTS}
                     for record in records(run)] for run in (result, plain))
    assert ours == theirs
    assert json.loads((result.directory / "manifest.json").read_text())["status"] == "done"
