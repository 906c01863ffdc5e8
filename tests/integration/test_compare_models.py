"""`tropism evaluate A B C`: several models on the same rows, and the paired intervals of their differences."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tropism.cli.app import main
from tropism.commands.scoring import compare, score, show
from tropism.commands.scoring.comparison import Comparison
from tropism.config import ScoringOptions
from tropism.errors import UsageError
from tropism.observe.console import Voice


@pytest.fixture
def two_runs(train: Callable[..., Any]) -> list[str]:
    """Two KTO runs on the same data, with other learning rates and betas."""
    return [str(train("kto", eval_fraction=0.3, max_steps=4, learning_rate=rate, beta=beta).directory)
            for rate, beta in ((1e-3, 0.1), (1e-2, 0.5))]


def compared(models: list[str], tmp_path: Path, **options: Any) -> Comparison:
    found = compare(models, ScoringOptions(store=str(tmp_path / "store"), **options))
    assert found is not None
    return found


def by_metric(comparison: Comparison) -> dict[str, dict[str, float]]:
    return {one.metric: one.values for one in comparison.differences}


def test_runs_keep_their_own_options(two_runs: list[str], tmp_path: Path) -> None:
    """Each column is what `evaluate RUN` alone gives, and differences are those of the columns."""
    found = compared(two_runs, tmp_path)
    for run, figures in zip(two_runs, found.figures, strict=True):
        last = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()][-1]
        assert figures["loss"] == pytest.approx(last["loss"], abs=1e-6)
    assert [scores.options.beta for scores in found.scores] == [0.1, 0.5]
    first, second = found.figures
    differences = by_metric(found)
    for key in ("rewards/auc", "rewards/margins"):
        assert differences[key]["difference"] == pytest.approx(second[key] - first[key], abs=1e-9)
        low, high = (differences[key][f"difference_{end}"] for end in ("low", "high"))
        assert low <= differences[key]["difference"] <= high
    tokens = [np.log(figures["perplexity"]) for figures in found.figures]
    assert differences["logps/token"]["difference"] == pytest.approx(tokens[0] - tokens[1], abs=1e-9)
    assert found.left_out == 0


def test_a_model_does_not_differ_from_itself(two_runs: list[str], tmp_path: Path) -> None:
    """The intervals are paired: both ends are 0 although each model's own interval is wide."""
    found = compared([two_runs[1], str(Path(two_runs[1]) / "model")], tmp_path)
    assert {tuple(values.values()) for values in by_metric(found).values()} == {(0.0, 0.0, 0.0)}
    assert len(by_metric(found)) == 3


def test_other_methods_on_pairs(train: Callable[..., Any], pairs: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    """A KTO run, a DPO run and the base model, by pairs."""
    runs = [str(train(method, max_steps=2).directory) for method in ("kto", "dpo")]
    found = compared([*runs, str(tiny_model_dir)], tmp_path, data=str(pairs), reference=str(tiny_model_dir))
    assert all("rewards/accuracies" in figures for figures in found.figures)
    assert found.figures[2]["rewards/accuracies"] == 0.5
    assert {one.model for one in found.differences} == {runs[1], str(tiny_model_dir)}
    alone = score(runs[1], ScoringOptions(data=str(pairs), reference=str(tiny_model_dir),
                                          store=str(tmp_path / "store")))
    assert found.scores[1].rewards() == alone.rewards()


def test_rows_that_not_all_keep_are_left_out(train: Callable[..., Any], tmp_path: Path,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    """The second run reads fewer tokens and drops a pair whose sides differ only at their ends."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"id": str(number), "prompt": f"p {number} ", "chosen": f"c {number}", "rejected": f"r {number}"}
            for number in range(6)]
    rows.append({"id": "long", "prompt": "p ", "chosen": "same " * 8 + "a", "rejected": "same " * 8 + "b"})
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = [str(train("dpo", max_steps=1, max_length=length).directory) for length in (64, 30)]
    found = compared(runs, tmp_path, data=str(pairs))
    assert [row.id for row in found.scores[0].rows] == [row.id for row in found.scores[1].rows] == list("012345")
    assert found.left_out == 1
    assert "loss" not in found.figures[0]
    show(found, Voice())
    assert "1 row left out, which not all models keep" in capsys.readouterr().out


def test_different_rows_are_refused(two_runs: list[str], train: Callable[..., Any], tmp_path: Path) -> None:
    """Runs on a copy of the data held out the same rows, runs with another fraction did not."""
    copy = str(train("kto", eval_fraction=0.3, max_steps=1, data=str(_copy(two_runs[0], tmp_path))).directory)
    assert compared([two_runs[0], copy], tmp_path).left_out == 0
    other = str(train("kto", eval_fraction=0.6, max_steps=1).directory)
    with pytest.raises(UsageError, match=r"held out different rows\. Pass --data DATA"):
        compared([two_runs[0], other], tmp_path)
    with pytest.raises(UsageError, match=r"run1: named twice"):
        compared([two_runs[0], *two_runs], tmp_path)


def test_runs_on_other_kinds_of_rows_are_refused_at_once(two_runs: list[str], train: Callable[..., Any],
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    dpo = str(train("dpo", eval_fraction=0.3, max_steps=1).directory)
    capsys.readouterr()
    assert main(["evaluate", *two_runs, dpo]) == 2
    said = capsys.readouterr()
    assert f"{two_runs[0]} is evaluated on labeled completions, but {dpo} on pairs. Pass --data DATA" in said.err
    assert "loading model" not in said.out


def test_a_report_on_the_data_is_printed_once(train: Callable[..., Any], pairs: Path, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    """One that differs, because a run reads fewer tokens, is printed too."""
    runs = [str(train("dpo", max_steps=1, max_length=length).directory) for length in (64, 64, 20)]
    capsys.readouterr()
    for models, wanted in ((runs[:2], 1), (runs, 2)):
        options = ScoringOptions(data=str(pairs), store=str(tmp_path / "store"))
        compare(models, options, Voice())
        said = capsys.readouterr().out.splitlines()
        assert len([line for line in said if line.startswith("reading ")]) == 1
        assert len([line for line in said if line.startswith("data: ")]) == wanted
        assert len([line for line in said if line.startswith("loading model ")]) == len(models)


def _copy(run: str, tmp_path: Path) -> Path:
    import yaml

    source = Path(yaml.safe_load((Path(run) / "config.yaml").read_text())["data"])
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(source.read_bytes())
    return copy


def test_the_table_and_the_file(two_runs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROPISM_STORE", str(tmp_path / "store"))
    assert main(["evaluate", *two_runs, "--json", str(tmp_path / "out.json")]) == 0
    said = capsys.readouterr().out
    names = [Path(run).name for run in two_runs]
    assert f"{names[1]} minus {names[0]}: rewards/auc " in said
    assert "the same for all models" in said
    written = json.loads((tmp_path / "out.json").read_text())
    assert [entry["model"] for entry in written["models"]] == two_runs
    assert all("rewards/auc" in entry["metrics"] for entry in written["models"])
    assert {entry["metric"] for entry in written["differences"]} == {"rewards/auc", "rewards/margins", "logps/token"}
    assert set(written["differences"][0]) == {"model", "metric", "difference", "low", "high"}
    assert written["left_out"] == 0


def test_a_wrong_name_is_said_first(two_runs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", two_runs[0], "./nowhere"]) == 2
    said = capsys.readouterr()
    assert "./nowhere" in said.err
    assert "loading model" not in said.out


def test_names_are_short_and_distinct() -> None:
    def names(*models: str) -> list[str]:
        return Comparison(models, [], [], [], 0).names

    assert names("runs/a", "runs/b") == ["a", "b"]
    assert names("x/a/model", "x/b/model/") == ["a/model", "b/model"]
    assert names("a", "a") == ["1: a", "2: a"]
