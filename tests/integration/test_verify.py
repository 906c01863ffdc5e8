"""`tropism verify`: what became of a run directory, and whether the run could be repeated here."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tropism.cli.app import main
from tropism.commands.verify import Verdict, verify


def states(verdict: Verdict) -> dict[str, str]:
    return {check.what: check.state for check in verdict.checks}


def how(verdict: Verdict, what: str) -> str:
    return next(check.how for check in verdict.checks if check.what == what)


@pytest.fixture
def copies(tiny_model_dir: Path, data_of: dict[str, Path], tmp_path: Path) -> dict[str, str]:
    """Model and data of our own, that a test may change."""
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    return {method: str(shutil.copy(path, tmp_path / f"{method}.jsonl")) for method, path in data_of.items()}


@pytest.fixture
def finished(train: Callable[..., Any], copies: dict[str, str], tmp_path: Path) -> Path:
    result = train("kto", model=str(tmp_path / "model"), data=copies["kto"], eval_fraction=0.2, max_steps=4,
                   save_every=2)
    return Path(result.directory)


def test_an_untouched_run_is_the_same_in_every_point(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    verdict = verify(finished)
    assert set(states(verdict).values()) == {"same"}, [str(check) for check in verdict.checks]
    assert {"config.yaml", "model", "checkpoints/step-00000002", "tokenizer", "template", "data", "eval_data",
            "initial weights", "libraries", "python", "device"} <= states(verdict).keys()
    capsys.readouterr()
    assert main(["verify", str(finished)]) == 0
    assert ": intact, reproducible on this machine" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*")}


def test_a_run_may_be_moved(finished: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere" / "run"
    moved.parent.mkdir()
    shutil.move(finished, moved)
    assert set(states(verify(moved)).values()) == {"same"}


def test_what_differs_is_named(finished: Path, tmp_path: Path, copies: dict[str, str]) -> None:
    """Each part alone, and how it differs."""
    weights = finished / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with (finished / "config.yaml").open("a") as file:
        file.write("# a note\n")
    next((finished / "checkpoints").glob("step-*/trainer.json")).write_text("{}")
    with Path(copies["kto"]).open("a") as file:
        file.write(json.dumps({"prompt": "oak? ", "completion": "elm", "label": True}) + "\n")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    verdict = verify(finished)
    found = states(verdict)
    assert {what for what, state in found.items() if state == "differs"} == {
        "model", "config.yaml", "data", "template", *(what for what in found if what.startswith("checkpoints/")
                                                     and found[what] == "differs")} | (
        {"eval_data"} if found["eval_data"] == "differs" else set())
    assert "model.safetensors has changed" in how(verdict, "model")
    assert "edited" in how(verdict, "config.yaml")
    assert "now" in how(verdict, "data")
    assert sum(state == "differs" for what, state in found.items() if what.startswith("checkpoints/")) == 1
    assert not verdict.intact
    assert not verdict.repeatable


def test_other_weights_of_the_same_name(finished: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.model.norm.weight.data[0] += 1e-6
    model.save_pretrained(tmp_path / "model")
    verdict = verify(finished)
    assert states(verdict)["initial weights"] == "differs"
    assert verdict.intact
    assert not verdict.repeatable


def test_what_is_gone_is_told_apart(finished: Path, tmp_path: Path, copies: dict[str, str],
                                    capsys: pytest.CaptureFixture[str]) -> None:
    Path(copies["kto"]).unlink()
    shutil.rmtree(finished / "model")
    (finished / "config.yaml").rename(finished / "kept.yaml")
    assert states(verify(finished))["config.yaml"] == "gone"
    assert states(verify(finished))["options"] == "unknown"
    (finished / "kept.yaml").rename(finished / "config.yaml")
    found = states(verify(finished))
    assert (found["data"], found["model"], found["initial weights"]) == ("gone", "gone", "same")
    shutil.rmtree(tmp_path / "model")
    found = states(verify(finished))
    assert (found["initial weights"], found["tokenizer"], found["data"]) == ("gone", "gone", "unknown")
    capsys.readouterr()
    assert main(["verify", str(finished)]) == 1
    out = capsys.readouterr().out
    assert "initial weights: not found" in out
    assert ": NOT intact, NOT reproducible" in out


def test_other_versions_and_devices_are_told(finished: Path) -> None:
    path = finished / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["libraries"] |= {"torch": "2.0.0", "no-such-library": "1.0"}
    manifest["device"] = "cuda:0"
    manifest["code"] = "0" * 32
    path.write_text(json.dumps(manifest))
    verdict = verify(finished)
    assert "torch was 2.0.0" in how(verdict, "libraries")
    assert "no-such-library was 1.0, now not installed" in how(verdict, "libraries")
    assert (states(verdict)["device"], states(verdict)["code"]) == ("differs", "differs")
    assert verdict.intact


def test_a_device_that_torch_does_not_know_is_told(finished: Path) -> None:
    path = finished / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "toaster"}))
    verdict = verify(finished)
    assert (states(verdict)["initial weights"], states(verdict)["device"]) == ("unknown", "differs")
    assert "no device of torch: toaster" in how(verdict, "initial weights")


def test_reference_and_teacher_are_weighed_too(train: Callable[..., Any], copies: dict[str, str], tmp_path: Path,
                                               tiny_model_dir: Path) -> None:
    """Also a teacher whose likeliest tokens are all that is kept of it."""
    other = tmp_path / "other"
    shutil.copytree(tiny_model_dir, other)
    result = train("dpo", data=copies["dpo"], reference=str(other), teacher=str(other), top_k=4, max_steps=1)
    found = states(verify(result.directory))
    assert (found["reference"], found["teacher"]) == ("same", "same")
    shutil.rmtree(other)
    found = states(verify(result.directory))
    assert (found["reference"], found["teacher"]) == ("gone", "gone")


def test_as_json(finished: Path, tmp_path: Path) -> None:
    assert main(["verify", str(finished), "--json", str(tmp_path / "verdict.json")]) == 0
    told = json.loads((tmp_path / "verdict.json").read_text())
    assert (told["intact"], told["reproducible_here"]) == (True, True)
    assert {check["state"] for check in told["checks"]} == {"same"}


def test_no_run_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "not a run directory" in capsys.readouterr().err
    (tmp_path / "manifest.json").write_text("[]")
    assert main(["verify", str(tmp_path)]) == 2
    assert "not the manifest" in capsys.readouterr().err


def test_interleaved_records_and_a_lost_manifest_are_told(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """S1: two processes that wrote one file left their steps out of order. Without the manifest the rest is checked."""
    metrics = finished / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join([*lines, lines[2]]))
    verdict = verify(finished)
    assert states(verdict)["metrics.jsonl"] == "differs"
    assert how(verdict, "metrics.jsonl").startswith(f"line {len(lines) + 1}: step ")
    assert not verdict.intact
    metrics.write_text("".join([*lines[:2], "{\n", *lines[2:]]))
    assert how(verify(finished), "metrics.jsonl").startswith("line 3: not valid JSON")
    metrics.unlink()
    assert states(verify(finished))["metrics.jsonl"] == "gone"
    (finished / "manifest.json").unlink()
    found = states(verify(finished))
    assert (found["manifest.json"], found["options"]) == ("gone", "unknown")
    assert found["checkpoints/step-00000002"] == "same"
    assert main(["verify", str(finished)]) == 1
    assert ": NOT intact, NOT reproducible" in capsys.readouterr().out
