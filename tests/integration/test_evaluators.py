"""Samples in the course of training and evaluators of the user: neither changes the run, and their figures are used."""

import json
import math
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from integration.resuming import (  # noqa: F401 (fixtures)
    answers,
    assert_same_run,
    during,
    lines,
    manifest,
    settings,
    start,
    stop_after,
    straight,
    teacher_dir,
)
from tropism import KTOTrainer
from tropism.cli.app import main
from tropism.errors import StoppedEarly, UsageError

MODULE = '''
import random
import numpy, torch
calls = 0
def rude(model, tokenizer, rows):
    """Leaves everything behind that can be left behind."""
    global calls
    calls += 1
    assert not model.training and not torch.is_grad_enabled()
    ids = torch.tensor([rows[0]["prompt_ids"]])
    out = model.generate(input_ids=ids, max_new_tokens=4)
    drawn = random.random() + float(numpy.random.rand()) + float(torch.rand(()))
    with torch.enable_grad():
        model(input_ids=ids).logits.sum().backward()
    model.train()
    model.requires_grad_(False)
    model.register_forward_hook(lambda *given: 1 / 0)
    model.config.vocab_size = 7
    model.generation_config.max_new_tokens = 1
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    rows.clear()
    torch.set_num_threads(1)
    return {"my/generated": out.shape[1] - ids.shape[1], "my/drawn": drawn, "my/whole": numpy.float32(2)}
def fails_later(model, tokenizer, rows):
    global calls
    calls += 1
    if calls % 4 > 1:
        raise RuntimeError("the judge is away")
    return {"judged": calls % 4}
def spoils(model, tokenizer, rows):
    next(model.parameters()).data.view(-1)[0] += 1e-3
    return {}
def quits(model, tokenizer, rows):
    raise SystemExit(3)
two = lambda model, tokenizer: {}
async def later(model, tokenizer, rows): return {}
number = 3
'''


@pytest.fixture(scope="module", autouse=True)
def module(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A module in the current directory, which is no longer on the path afterwards."""
    path, before = tmp_path_factory.mktemp("here"), list(sys.path)
    (path / "own_evals.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        yield path
    sys.path[:] = before
    sys.modules.pop("own_evals", None)


def during_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples_during.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def with_both(straight: Callable[..., Path]) -> Path:  # noqa: F811
    return straight("kto", evaluator="own_evals:rude", sample_every=3, samples=2)


def test_neither_changes_the_run(with_both: Path, straight: Callable[..., Path]) -> None:  # noqa: F811
    """Weights, all other figures and samples are the same to the bit as without; random streams as well."""
    plain = straight("kto", samples=2)
    own = [{key: value for key, value in line.items() if not key.startswith("my/")} for line in lines(with_both)]
    assert own == lines(plain)
    for name in ("model/model.safetensors", "samples.jsonl", "model/tokenizer_config.json",
                 "model/generation_config.json", "model/config.json"):
        assert (with_both / name).read_bytes() == (plain / name).read_bytes(), name
    assert not (plain / "samples_during.jsonl").exists()


def test_what_is_written(with_both: Path) -> None:
    evaluations = [line for line in lines(with_both) if line["split"] == "eval"]
    assert [line["step"] for line in evaluations] == [0, 2, 4, 6, 7]
    assert all(0 <= line["my/generated"] <= 4 and line["my/whole"] == 2.0 for line in evaluations)
    assert len({line["my/drawn"] for line in evaluations}) == 1  # the seed of the run, each time
    assert manifest(with_both)["evaluators"].keys() == {"own_evals:rude"}
    assert "evaluator: own_evals:rude\n" in (with_both / "config.yaml").read_text()
    found = during_of(with_both)
    assert [line["step"] for line in found] == [3, 3, 6, 6]
    before = [json.loads(line) for line in (with_both / "samples.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in found[:2]] == [line["prompt"] for line in before]
    assert all(line["held_out"] and isinstance(line["completion"], str) for line in found)


@pytest.mark.parametrize("step", [3, 4])
def test_a_resumed_run_is_the_same(with_both: Path, start: Any, stop_after: Any, during: Any,  # noqa: F811
                                   tmp_path: Path, step: int) -> None:
    """Step 3 is stopped with samples due, step 4 with an evaluation due."""
    more = {"evaluator": "own_evals:rude", "sample_every": 3, "samples": 2, "resume": "auto"}
    stop_after(step, signal.SIGTERM)
    with pytest.raises(StoppedEarly):
        start("kto", tmp_path / "run", **more)
    during()
    start("kto", tmp_path / "run", **more)
    assert_same_run(tmp_path / "run", with_both)
    assert during_of(tmp_path / "run") == during_of(with_both)


def test_a_checkpoint_of_before_is_cut_back_to(with_both: Path, start: Any, during: Any,  # noqa: F811
                                               tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("pulled")

    more = {"evaluator": "own_evals:rude", "sample_every": 3, "samples": 2, "resume": "auto", "save_every": 2}
    during(7, fail)
    with pytest.raises(RuntimeError, match="pulled"):
        start("kto", tmp_path / "run", **more)
    assert [line["step"] for line in during_of(tmp_path / "run")] == [3, 3, 6, 6]
    during()
    start("kto", tmp_path / "run", **more)
    assert during_of(tmp_path / "run") == during_of(with_both)
    assert_same_run(tmp_path / "run", with_both)


def test_a_failure_after_the_start_is_noted(start: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],  # noqa: F811
                                            ) -> None:
    import own_evals

    own_evals.calls = 0
    result = start("kto", tmp_path / "run", evaluator="own_evals:fails_later",
                   keep_best="judged:max", stop_metric="judged:max", stop_patience=9)
    judged = [line["judged"] for line in lines(tmp_path / "run") if line["split"] == "eval"]
    assert judged == [1, None, None, 0, 1]
    said = capsys.readouterr().out.replace("\n", " ")
    assert "own_evals:fails_later: " in said
    assert "RuntimeError: the judge is away. Training continues" in said
    notices = [json.loads(line) for line in (tmp_path / "run/notices.jsonl").read_text().splitlines()]
    assert [line["step"] for line in notices if line["guard"] == "evaluator"] == [2, 4]
    assert math.isfinite(result.after["judged"])
    best = json.loads((tmp_path / "run/checkpoints/best.json").read_text())
    assert (best["metric"], best["value"]) == ("judged", 1.0)


@pytest.mark.parametrize(("name", "said"), [
    ("own_evals:fails_now", "has no fails_now"), ("own_evals.py:rude", "Write --evaluator own_evals:rude"),
    ("own_evals", "not of the form module:function"), ("nothing_here:f", "nothing_here cannot be imported"),
    ("own_evals:two", r"takes \(model, tokenizer, rows\)"), ("own_evals:later", "is async"),
    ("own_evals:number", "a int is not a function"), ("own_evals:rude,own_evals:rude", "twice")])
def test_wrong_names_are_refused_before_anything_is_read(start: Any, tmp_path: Path, name: str,  # noqa: F811
                                                         said: str) -> None:
    with pytest.raises(UsageError, match=said):
        start("kto", tmp_path / "run", evaluator=name)
    assert not (tmp_path / "run").exists()


def test_an_evaluator_that_fails_or_spoils_the_model_stops_the_run_before_step_1(start: Any,  # noqa: F811
                                                                                tmp_path: Path) -> None:
    for number, (name, said) in enumerate({"quits": "SystemExit: 3", "spoils": "changed 2 weights"}.items()):  # tied
        with pytest.raises(UsageError, match=said):
            start("kto", tmp_path / str(number), evaluator=f"own_evals:{name}")
        assert not (tmp_path / str(number) / "metrics.jsonl").exists()


@pytest.mark.parametrize(("changes", "said"), [
    ({"evaluator": "own_evals:rude", "keep_best": "my/drawn"}, "my/drawn:max or my/drawn:min"),
    ({"evaluator": "own_evals:rude", "stop_metric": "loss:max"}, "is not one of"),
    ({"keep_best": "my/drawn:max"}, "is not one of"),
    ({"evaluator": "own_evals:rude", "eval_fraction": 0}, "requires rows to evaluate"),
    ({"sample_every": 2, "samples": 0}, "no effect with --samples 0")])
def test_options_that_cannot_work(start: Any, tmp_path: Path, changes: dict[str, Any], said: str) -> None:  # noqa: F811
    with pytest.raises((UsageError, ValueError), match=said):
        start("kto", tmp_path / "run", **changes)


def test_a_metric_that_no_evaluator_returns_stops_the_run_at_step_0(start: Any, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(UsageError, match="my/other is not a metric of this evaluation"):
        start("kto", tmp_path / "run", evaluator="own_evals:rude", keep_best="my/other:max")
    assert len(lines(tmp_path / "run")) == 1


def test_functions_from_python(small: Callable[..., KTOTrainer]) -> None:
    """A function or several. Rows have what the run evaluates, and each call starts from the same random state."""
    seen: list[Any] = []

    def look(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, float]:
        seen.append((rows[0], random.getstate(), np.random.rand(), torch.rand(())))
        return {"count": len(rows)}

    trainer = small("kto", eval_fraction=0.3, evaluator=[look, lambda model, tokenizer, rows: {"one": 1}], max_steps=1)
    result = trainer.fit()
    assert result.after["count"] == len(trainer.run.inputs.held_out)
    assert result.after["one"] == 1
    row = seen[0][0]
    assert {"id", "place", "prompt", "prompt_ids", "completion", "label"} == row.keys()
    assert isinstance(row["label"], bool)
    assert trainer.run.inputs.tokenizer.decode(row["prompt_ids"]) == row["prompt"]
    assert seen[0][1:] == seen[1][1:]
    assert trainer.evaluate()["count"] == result.after["count"]
    with pytest.raises(UsageError, match="functions and names"):
        small("kto", eval_fraction=0.3, evaluator=[look, "own_evals:rude"])


def test_a_file_names_no_code(with_both: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A YAML file and a run directory may be someone else's: their evaluator is refused unless the command says so."""
    for command in (["resume", str(with_both)], ["train", str(with_both / "config.yaml")]):
        assert main(command) == 2
        said = capsys.readouterr().err.replace("\n", " ")
        assert "a file cannot name code to run" in said
        assert "--evaluator own_evals:rude" in said
        assert "--evaluator none" in said
    assert main(["resume", str(with_both), "--evaluator", "none"]) == 0
    assert "already finished" in capsys.readouterr().out


def test_the_report_shows_both(with_both: Path) -> None:
    from tropism.report.charts import charts_of
    from tropism.report.read import read_run

    run = read_run(with_both, "run")
    assert run.evaluator_metrics == ["my/generated", "my/drawn", "my/whole"]
    assert [chart.name for chart in charts_of([run]) if chart.name.startswith("evaluator-")] == [
        "evaluator-my/generated", "evaluator-my/drawn", "evaluator-my/whole"]
    assert [[when for when, _ in sample["shown"]] for sample in run.sampled] == [
        ["before", "after step 3", "after step 6", "after"]] * 2
