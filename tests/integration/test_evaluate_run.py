"""`evaluate RUN` and `score RUN` without options: the run's own options, reference and held-out rows, and what is said
where these are gone or were trained on."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pyarrow import parquet
from transformers import AutoModelForCausalLM

from processes import run_ranks
from tropism.cli.app import main
from tropism.commands.scoring import figures, score
from tropism.config import METHODS, ScoringOptions
from tropism.errors import DataError, ModelError, TropismError, UsageError
from tropism.runner import run

Trained = Callable[..., Path]


@pytest.fixture(scope="module")
def teacher(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with its weights moved."""
    path = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(tiny_model_dir, path)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trained(tiny_model_dir: Path, teacher: Path, feedback: Path, pairs: Path,
            tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A finished run with held-out rows and options that differ from the defaults. Each kind is trained once."""
    made: dict[str, Path] = {}

    def go(method: str, **changes: Any) -> Path:
        name = f"{method} {changes}"
        if name not in made:
            folder = tmp_path_factory.mktemp("runs")
            data = {"kto": feedback, "dpo": pairs}.get(method, feedback)
            settings = {"model": str(tiny_model_dir), "data": str(data), "output": str(folder / "run"),
                        "store": str(folder / "store"), "batch_size": 8, "max_steps": 5, "learning_rate": 3e-3,
                        "samples": 0, "max_length": 80, "eval_fraction": 0.3, **changes}
            if method in ("kto", "dpo"):
                settings.setdefault("beta", 0.3)
            if method == "kd":
                settings["teacher"] = str(teacher)
            run(METHODS[method](**settings))
            made[name] = folder / "run"
        return made[name]

    return go


@pytest.fixture
def evaluated(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What `evaluate --json` writes."""
    def go(*arguments: Path | str) -> dict[str, Any]:
        out = tmp_path / "figures.json"
        assert main(["evaluate", *map(str, arguments), "--store", str(tmp_path / "store"), "--json", str(out)]) == 0
        return json.loads(out.read_text())

    return go


def last_record(directory: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["split"] == "eval"][-1]
    return {key: value for key, value in last.items() if key not in ("step", "split")}


def assert_same(found: dict[str, float], record: dict[str, float]) -> None:
    assert record
    for key, value in record.items():
        assert found[key] == pytest.approx(value, rel=1e-6, abs=1e-6), key


KINDS: list[tuple[str, dict[str, Any]]] = [
    *((method, changes) for method in METHODS for changes in ({}, {"lora": {"rank": 4}})),
    ("dpo", {"loss": "simpo", "beta": 2.0}), ("dpo", {"ld_alpha": 0.5}), ("dpo", {"loss": "aot,sft"}),
    ("dpo", {"wpo": True, "reference": "live"}), ("dpo", {"layout": "padded", "precision": "bf16"}),
    ("kto", {"loss": "bco"}), ("kto", {"desirable_weight": "auto", "undesirable_weight": "auto"}),
    ("kto", {"eval_limit": 5}), ("kd", {"top_k": 4})]


@pytest.mark.some(4)
@pytest.mark.parametrize(("method", "changes"), KINDS, ids=lambda value: str(value))
def test_the_last_evaluation_of_a_run_is_reproduced(trained: Trained, evaluated: Callable[..., Any], method: str,
                                                    changes: dict[str, Any]) -> None:
    """L5: every key to 1e-6, from nothing but the name of the run."""
    directory = trained(method, **changes)
    found = evaluated(directory)
    assert_same(found["metrics"], last_record(directory))
    assert found["rows"] == changes.get("eval_limit", len((directory / "eval_rows.jsonl").read_text().splitlines()))


def test_chats_with_renamed_columns_and_a_system_prompt(trained: Trained, evaluated: Callable[..., Any], tmp_path: Path,
                                                        ) -> None:
    """Template, system prompt and column names are the run's."""
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"talk": [
        {"role": "user", "content": f"Tree {n}"}, {"role": "assistant", "content": "oak"},
        {"role": "user", "content": "Another"}, {"role": "assistant", "content": f"elm {n}"}]}) + "\n"
        for n in range(20)))
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
                        "{% if add_generation_prompt %}[assistant] {% endif %}")
    directory = trained("sft", data=str(data), columns="messages=talk", system_prompt="Be brief.",
                        chat_template=str(template))
    found = evaluated(directory)
    assert_same(found["metrics"], last_record(directory))
    assert (found["columns"], found["system_prompt"]) == ("messages=talk", "Be brief.")
    other = evaluated(directory, "--system-prompt", "Take your time.")
    assert other["rows"] == found["rows"]
    assert other["metrics"]["loss"] != found["metrics"]["loss"]


def test_with_another_reference(trained: Trained, evaluated: Callable[..., Any], teacher: Path, pairs: Path) -> None:
    """The baselines are those of the initial policy, which is not the reference."""
    directory = trained("dpo", reference=str(teacher), eval_data=str(pairs), eval_fraction=0.0)
    assert_same(evaluated(directory)["metrics"], last_record(directory))


def trained_and_evaluated(rank: int, size: int, port: int, jobs: list[tuple[str, dict[str, Any]]]) -> None:
    """One of several processes: trains runs, and writes the metrics of each as it evaluates it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    for method, settings in jobs:
        directory = run(METHODS[method](**settings)).directory
        scores = score(str(directory), ScoringOptions(store=settings["store"]))
        if rank == 0:
            directory.with_suffix(".json").write_text(json.dumps(figures(scores)))


@pytest.mark.parametrize("kinds", [
    [("kto", {"parallel": {"shard": "on"}}), ("dpo", {"lora": {"rank": 4}})],
    pytest.param([("kto", {"lora": {"rank": 4}}), ("dpo", {}), ("sft", {}), ("sft", {"lora": {"rank": 4}}), ("kd", {}),
                  ("kd", {"lora": {"rank": 4}})], marks=pytest.mark.slow)], ids=["two", "others"])
def test_two_processes(tiny_model_dir: Path, teacher: Path, data_of: dict[str, Path], tmp_path: Path,
                       evaluated: Callable[..., Any], kinds: list[tuple[str, dict[str, Any]]]) -> None:
    """X1: trained and evaluated in two processes, and evaluated again in one."""
    jobs = [(method, {
        "model": str(tiny_model_dir), "data": str(data_of.get(method, data_of["kto"])), "batch_size": 8, "max_steps": 3,
        "output": str(tmp_path / f"run{number}"), "store": str(tmp_path / "store"), "learning_rate": 3e-3, "samples": 0,
        "eval_fraction": 0.3, "max_length": 80, **({"teacher": str(teacher)} if method == "kd" else {}), **changes})
        for number, (method, changes) in enumerate(kinds)]
    assert run_ranks(2, trained_and_evaluated, jobs) == [0, 0]
    for _, settings in jobs:
        directory = Path(settings["output"])
        assert_same(json.loads(directory.with_suffix(".json").read_text()), last_record(directory))
        assert_same(evaluated(directory)["metrics"], last_record(directory))


def test_scores_before_and_after(trained: Trained, tmp_path: Path) -> None:
    """Held-out rows have both policies' scores, as `tropism score RUN` gives them; training rows the reference's."""
    for method in ("kto", "dpo", "sft"):
        directory = trained(method)
        table = parquet.read_table(directory / "scores.parquet").to_pylist()
        held_out = [line for line in table if line["split"] == "eval"]
        out = tmp_path / f"{method}.jsonl"
        assert main(["score", str(directory), "--store", str(tmp_path / "store"), "--output", str(out)]) == 0
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        ids = [json.loads(line)["id"] for line in (directory / "eval_rows.jsonl").read_text().splitlines()]
        assert [row["id"] for row in rows] == ids
        names = ("chosen_", "rejected_") if method == "dpo" else ("",)
        assert [line["logps_after"] for line in held_out] == pytest.approx(
            [row[f"{name}logps"] for row in rows for name in names], rel=1e-6)
        assert [line["side"] for line in held_out[:2]] == (["chosen", "rejected"] if method == "dpo" else [None, None])
        assert all(line["logps_before"] != line["logps_after"] for line in held_out)
        others = [line for line in table if line["split"] == "train"]
        rows_read = json.loads((directory / "audit.json").read_text())["rows"]["kept"]
        assert len(table) == rows_read * len(names)
        assert all((line["reference_logps"] is None) == (method == "sft") for line in others)
        if method != "sft":
            assert [line["reward_after"] for line in held_out] == pytest.approx(
                [row[f"{name}reward"] for row in rows for name in names], abs=1e-5)
            assert all(line["reward_before"] == 0 for line in held_out)


def test_other_views_of_the_data(trained: Trained, evaluated: Callable[..., Any], feedback: Path, pairs: Path) -> None:
    """The data decides: a KTO run by pairs, a DPO run by labels, and an SFT run by either."""
    for method in ("kto", "dpo", "sft"):
        by_pairs, by_labels = (evaluated(trained(method), "--data", data) for data in (pairs, feedback))
        assert {"logps/chosen", "baselines/length", "perplexity/rejected"} <= by_pairs["metrics"].keys()
        if method != "sft":
            assert {"rewards/accuracies", "rewards/margins", "kl/token"} <= by_pairs["metrics"].keys()
            assert {"rewards/auc", "rewards/margins", "kl/token"} <= by_labels["metrics"].keys()
            assert by_pairs["beta"] == by_labels["beta"] == 0.3
        assert ("loss" in by_pairs["metrics"]) == (method == "dpo")
        assert ("loss" in by_labels["metrics"]) == (method in ("kto",))


def test_rows_that_were_trained_on_are_counted(trained: Trained, evaluated: Callable[..., Any], feedback: Path,
                                               tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By their content, whatever their ids: also in another file, as pairs, and where only the prompt is the same."""
    directory = trained("kto")
    held_out = len((directory / "eval_rows.jsonl").read_text().splitlines())
    rows = [json.loads(line) for line in feedback.read_text().splitlines()]

    def said(changed: list[dict[str, Any]]) -> str:
        data = tmp_path / "other.jsonl"
        data.write_text("".join(json.dumps({**row, "id": f"new {n}"}) + "\n" for n, row in enumerate(changed)))
        capsys.readouterr()
        evaluated(directory, "--data", data)
        return " ".join(capsys.readouterr().out.split())

    assert f"note: {43 - held_out} of 43 rows were trained on by the run {directory}" in said(rows[::-1])
    keys = [(row["prompt"], row["completion"]) for row in rows]
    assert len(set(keys)) == 43
    text = said([{**row, "completion": f"x {row['completion']}"} for row in rows])
    assert f"note: {43 - held_out} of 43 rows share a prompt with training rows of the run" in text
    text = said([{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "new"} for row in rows])
    assert f"{43 - held_out} of 43 rows were trained on" in text
    assert "trained on by" not in said([{**row, "prompt": f"New: {row['prompt']}"} for row in rows])
    capsys.readouterr()
    evaluated(directory)
    assert "trained on by" not in capsys.readouterr().out


def moved(directory: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a run with other values in config.yaml."""
    shutil.copytree(directory, folder)
    values = yaml.safe_load((folder / "config.yaml").read_text()) | changes
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder


def test_a_moved_run_and_data_that_grew(trained: Trained, evaluated: Callable[..., Any], feedback: Path, tmp_path: Path,
                                        ) -> None:
    """The held-out rows are recognized among others, in another order."""
    lines = feedback.read_text().splitlines()
    more = [json.dumps({"prompt": f"Q{n}?", "completion": "oak", "label": True}) for n in range(20)]
    (tmp_path / "grown.jsonl").write_text("\n".join(more + lines[::-1]) + "\n")
    copy = moved(trained("kto"), tmp_path / "elsewhere", data=str(tmp_path / "grown.jsonl"))
    assert_same(evaluated(copy)["metrics"], last_record(copy))
    assert_same(evaluated(copy / "model")["metrics"], last_record(copy))


def test_options_that_change_the_texts_keep_the_rows(trained: Trained, evaluated: Callable[..., Any]) -> None:
    """Truncated otherwise, they are the same rows."""
    directory = trained("kto")
    found = evaluated(directory, "--max-length", "40", "--beta", "0.7")
    assert found["rows"] == len((directory / "eval_rows.jsonl").read_text().splitlines())
    assert found["max_length"] == 40
    assert found["metrics"]["logps/all"] != evaluated(directory)["metrics"]["logps/all"]


@pytest.mark.parametrize("what", ["changed", "gone", "given in Python", "none held out"])
def test_rows_that_cannot_be_found_again(trained: Trained, feedback: Path, tmp_path: Path, what: str) -> None:
    """What is wrong, and that --data helps."""
    changed = tmp_path / "changed.jsonl"
    changed.write_text(feedback.read_text().replace("oak", "pear"))
    changes: dict[str, Any] = {"data": str({"changed": changed, "gone": tmp_path / "gone.jsonl"}.get(
        what, "a list given in Python"))} if what != "none held out" else {"eval_fraction": 0.0}
    copy = moved(trained("kto"), tmp_path / "copy", **changes)
    sentence = {"changed": r"changed\.jsonl: \d+ of 1?\d rows that the run .* held out have changed or are gone",
                "gone": r"gone\.jsonl: file not found\. It is read as the evaluation data of the run",
                "given in Python": "the data of this run was passed in Python",
                "none held out": "this run held out no rows"}[what]
    with pytest.raises(TropismError, match=rf"{sentence}.*Pass --data DATA"):
        score(str(copy), ScoringOptions(store=str(tmp_path / "store")))
    score(str(copy), ScoringOptions(data=str(feedback), store=str(tmp_path / "store")))


def test_a_run_of_an_earlier_version(trained: Trained, evaluated: Callable[..., Any], feedback: Path, tmp_path: Path,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    """Without the files about rows, the split is computed again, and compared with its fingerprint."""
    copy = moved(trained("kto"), tmp_path / "old")
    for name in ("eval_rows.jsonl", "scores.parquet"):
        (copy / name).unlink()
    assert_same(evaluated(copy)["metrics"], last_record(copy))
    evaluated(copy, "--data", feedback)
    assert "has no scores.parquet, so Tropism cannot tell" in " ".join(capsys.readouterr().out.split())
    data = tmp_path / "changed.jsonl"
    data.write_text(feedback.read_text().replace("oak", "pear"))
    with pytest.raises(UsageError, match=r"held out have changed, and the run has no eval_rows\.jsonl.*Pass --data"):
        score(str(moved(copy, tmp_path / "older", data=str(data))), ScoringOptions(store=str(tmp_path / "store")))


@pytest.mark.parametrize("content", ["{\"id\": 1}\n", "[]\n", "{\"id\": \"a\", \"place\": \"b\", \"key\": null}\n"])
def test_files_that_no_run_writes(trained: Trained, feedback: Path, tmp_path: Path, content: str,
                                  capsys: pytest.CaptureFixture[str]) -> None:
    """Files of a run are data: an error with the line, and for the scores a note."""
    copy = moved(trained("kto"), tmp_path / "copy")
    (copy / "eval_rows.jsonl").write_text(content)
    (copy / "scores.parquet").write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(DataError, match=r"eval_rows\.jsonl:1: "):
        score(str(copy), ScoringOptions(store=str(tmp_path / "store")))
    score(str(copy), ScoringOptions(data=str(feedback), store=str(tmp_path / "store")))
    assert "cannot tell which of the rows the run was trained on" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", ["eval_rows.jsonl", "scores.parquet"])
def test_pipes_and_links_are_refused(trained: Trained, feedback: Path, tmp_path: Path, name: str) -> None:
    copy = moved(trained("kto"), tmp_path / "copy")
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(TropismError, match=f"{name} is a named pipe"):
        score(str(copy), ScoringOptions(data=str(feedback), store=str(tmp_path / "store")))


def test_the_cache_that_a_run_names_is_not_used(trained: Trained, feedback: Path, tmp_path: Path) -> None:
    """Nothing in config.yaml makes this command write or delete files elsewhere."""
    copy = moved(trained("kto"), tmp_path / "copy", store=str(tmp_path / "theirs"), store_limit="1KB")
    score(str(copy), ScoringOptions(store=str(tmp_path / "store")))
    assert not (tmp_path / "theirs").exists()


def test_a_run_without_a_result(trained: Trained, tmp_path: Path, pairs: Path) -> None:
    """A run that was stopped, and a checkpoint: what there is to evaluate."""
    copy = moved(trained("dpo", save_every=5, checkpoint_model=True), tmp_path / "copy")
    step = copy / "checkpoints" / "step-00000005"
    assert_same(figures(score(str(step), ScoringOptions(store=str(tmp_path / "store")))), last_record(copy))
    shutil.rmtree(copy / "model")
    with pytest.raises(ModelError, match=r"no trained model yet.*tropism resume .*--checkpoint step-00000005"):
        score(str(copy), ScoringOptions(store=str(tmp_path / "store")))
    shutil.rmtree(step / "model")
    with pytest.raises(ModelError, match=r"this checkpoint has no model/.*tropism export"):
        score(str(step), ScoringOptions(store=str(tmp_path / "store")))


def test_models_that_are_gone(trained: Trained, tiny_model_dir: Path, tmp_path: Path, evaluated: Callable[..., Any],
                              capsys: pytest.CaptureFixture[str]) -> None:
    """The reference can be named; without its teacher a run has no loss, and nothing else is put in its place."""
    copy = moved(trained("dpo"), tmp_path / "copy", model=str(tmp_path / "gone"))
    with pytest.raises(ModelError, match=r"gone: directory not found.*pass --reference MODEL"):
        score(str(copy), ScoringOptions(store=str(tmp_path / "store")))
    found = evaluated(copy, "--reference", tiny_model_dir)["metrics"]
    assert_same(found, {key: value for key, value in last_record(copy).items() if not key.startswith("baselines")})
    named = moved(trained("dpo"), tmp_path / "named", reference=str(tmp_path / "gone"))
    with pytest.raises(ModelError, match=r"gone: directory not found.*pass --reference MODEL"):
        score(str(named), ScoringOptions(store=str(tmp_path / "store")))
    copy = moved(trained("kd"), tmp_path / "kd", teacher=str(tmp_path / "gone"))
    assert not {"loss", "kd/ce", "kd/divergence"} & evaluated(copy)["metrics"].keys()
    assert "The losses of the run need this teacher" in " ".join(capsys.readouterr().out.split())


def test_a_model_needs_data(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(tiny_model_dir)]) == 2
    assert "--data is required" in capsys.readouterr().err


def test_the_files_survive_a_resume(train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: byte for byte as in a straight run, also where the scores before training are not the reference's."""
    from tropism.commands.verify import verify
    from tropism.errors import StoppedEarly
    from tropism.train.preemption import Preemption

    def stop(self: Preemption, *_: Any, **__: Any) -> int:
        return 30 if self.longest["step"] else 0

    for method, changes in (("kto", {}), ("dpo", {"loss": "simpo"})):
        settings = {"max_steps": 4, "eval_fraction": 0.3, **changes}
        straight = train(method, **settings)
        settings["output"] = str(tmp_path / method)
        with monkeypatch.context() as patch:
            patch.setattr(Preemption, "request", stop)
            with pytest.raises(StoppedEarly):
                train(method, **settings)
        resumed = train(method, **settings, resume="auto")
        for name in ("eval_rows.jsonl", "scores.parquet"):
            assert (resumed.directory / name).read_bytes() == (straight.directory / name).read_bytes()
        checks = {check.what: check.state for check in verify(resumed.directory).checks}
        assert checks["eval_rows.jsonl"] == checks["scores.parquet"] == "same"
        with (resumed.directory / "scores.parquet").open("ab") as file:
            file.write(b"x")
        assert {check.what: check.state for check in verify(resumed.directory).checks}["scores.parquet"] == "differs"


def test_scores_that_cannot_be_written_cost_no_run(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """The model is complete, and the log says what is missing."""
    from tropism.errors import OutputError
    from tropism.train import result as of_run

    def full(path: Path, *_: Any) -> None:
        raise OutputError(f"{path}: cannot be written: No space left on device")

    monkeypatch.setattr(of_run, "write_scores", full)
    result = train("kto", max_steps=2, eval_fraction=0.3)
    manifest = json.loads((result.directory / "manifest.json").read_text())
    assert manifest["status"] == "done"
    assert manifest["files"].keys() == {"eval_rows.jsonl"}
    assert "No space left on device. The run is complete without this file" in " ".join(capsys.readouterr().out.split())
