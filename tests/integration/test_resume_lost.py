"""Resuming a run of which something is lost, damaged or half done: compared with what its checkpoint recorded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.resuming import (
    Start,
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
from tropism.cli.app import main
from tropism.errors import CheckpointError, OutputError, StoppedEarly, TropismError
from tropism.train.checkpoints import files as checkpoint

__all__ = ["answers", "during", "settings", "start", "stop_after", "straight", "teacher_dir"]


@pytest.fixture(scope="module")
def stopped(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after four of seven steps, with checkpoints of steps 2 and 4."""
    output = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patch:
        during.__wrapped__(patch)(4)  # type: ignore[attr-defined]
        with pytest.raises(StoppedEarly):
            start("dpo", output, save_every=2)
    return output


@pytest.fixture
def output(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def content(output: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in output.rglob("*") if path.is_file()}


def without_fingerprints(file: Path) -> None:
    found = json.loads(file.read_text())
    for name in ("policy", "reference", "layout"):
        del found[name]
    file.write_text(json.dumps({**found, "fingerprints": {}, "libraries": {}}))


LOSSES: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink, "empty": lambda file: file.write_text(""),
    "zeros": lambda file: file.write_bytes(bytes(99)),
    "cut": lambda file: file.write_text(file.read_text()[:300]), "list": lambda file: file.write_text("[]"),
    "types": lambda file: file.write_text('{"fingerprints": ["data"], "status": 3}'),
    "no fingerprints": without_fingerprints}


@pytest.mark.some(3)
@pytest.mark.parametrize("loss", LOSSES)
def test_without_its_manifest_a_run_is_compared_with_its_checkpoint(
        loss: str, output: Path, start: Start, straight: Callable[..., Path], tmp_path: Path, teacher_dir: Path,
        settings: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    """C2: other data and weights are refused by name, and nothing is changed; the same run goes on to the bit."""
    LOSSES[loss](output / "manifest.json")
    before = content(output)
    other = tmp_path / "other.jsonl"
    rows = Path(settings("dpo", output)["data"]).read_text().splitlines(keepends=True)
    other.write_text("".join(rows[:-1]))
    for changes, sentence in (({"data": other}, "the (training|evaluation) data changed since the run started"),
                              ({"model": teacher_dir}, "the initial weights of the model and the reference changed"),
                              ({"beta": 0.3}, r"--beta \(was 0\.1, now 0\.3\)")):
        with pytest.raises(CheckpointError, match=sentence):
            start("dpo", output, resume="auto", save_every=2, **changes)
        assert content(output) == before
    capsys.readouterr()
    start("dpo", output, resume="auto", save_every=2)
    told = "What the checkpoint recorded is used instead" in capsys.readouterr().out
    assert told == (loss != "no fingerprints")
    assert_same_run(output, straight("dpo"))
    assert manifest(output)["status"] == "done"
    assert manifest(output)["resumed"][-1]["step"] == 4
    assert {"data", "tokenizer", "template", "config"} <= manifest(output)["fingerprints"].keys()


def test_another_layout_is_refused_without_the_manifest(output: Path, start: Start,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: chosen at the start, so no option tells it."""
    from tropism.train.setup import build

    (output / "manifest.json").unlink()
    real = build.choose_layout
    monkeypatch.setattr(build, "choose_layout", lambda *args: real(*args[:-1], "padded"))
    with pytest.raises(CheckpointError, match="the layout changed"):
        start("dpo", output, resume="auto", save_every=2)


@pytest.mark.parametrize("name", ["data", "tokenizer", "policy"])
def test_manifest_and_checkpoint_that_disagree(name: str, output: Path, start: Start) -> None:
    """C2: one of them is of another run, and the sentence says which part and what to do."""
    found = manifest(output)
    (found if name == "policy" else found["fingerprints"])[name] = "0" * 32
    (output / "manifest.json").write_text(json.dumps(found))
    before = content(output)
    with pytest.raises(CheckpointError, match=r"manifest\.json and step-00000004 disagree about the .*delete manifest"):
        start("dpo", output, resume="auto", save_every=2)
    assert content(output) == before


def test_a_finished_run_without_manifest_and_checkpoint_keeps_its_model(start: Start, tmp_path: Path) -> None:
    """C2: it is not begun again over the model."""
    output = start("dpo", tmp_path / "run", max_steps=2).directory
    (output / "manifest.json").unlink()
    before = content(output)
    with pytest.raises(CheckpointError, match=r"whether the run is finished is unknown.*model is in .*--output NEW"):
        start("dpo", output, max_steps=2, resume="auto")
    assert content(output) == before


@pytest.mark.parametrize("lost", [("config.yaml",), ("config.yaml", "manifest.json", "audit.json")])
@pytest.mark.parametrize("empty", [False, True])
def test_a_run_without_its_options_resumes_with_those_of_its_checkpoint(
        lost: tuple[str, ...], empty: bool, output: Path, straight: Callable[..., Path],
        capsys: pytest.CaptureFixture[str]) -> None:
    """C2: `tropism resume RUN` reads config.yaml, but a checkpoint has all of it."""
    for name in lost:
        (output / name).write_text("") if empty else (output / name).unlink()
    assert main(["resume", str(output)]) == 0
    assert "config.yaml is missing or empty. Resuming with the options in" in capsys.readouterr().err
    assert_same_run(output, straight("dpo"))
    assert (output / "config.yaml").read_text().startswith("method: dpo")
    assert json.loads((output / "audit.json").read_text())["rows"]["read"]


def test_neither_options_nor_a_checkpoint(output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (output / "config.yaml").unlink()
    shutil.rmtree(output / "checkpoints")
    assert main(["resume", str(output)]) == 2
    assert "has no config.yaml" in capsys.readouterr().err


def damage(file: Path, number: int) -> None:
    content = file.read_text().splitlines(keepends=True)
    content[number - 1] = "x" + content[number - 1][1:]
    file.write_text("".join(content))


def test_a_damaged_record_is_found_before_training(output: Path, start: Start, during: Callable[..., None],
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    """C2: by file and line; an earlier checkpoint whose records are intact can be used."""
    metrics = output / "metrics.jsonl"
    early, late = (checkpoint.verify(one.path)["offsets"]["metrics.jsonl"]
                   for one in checkpoint.listed(output / "checkpoints"))
    first = metrics.read_bytes()[:early].count(b"\n")
    assert metrics.read_bytes()[:late].count(b"\n") > first
    damage(metrics, first + 1)
    before = content(output)
    during(5, lambda: pytest.fail("a step was done"))
    with pytest.raises(CheckpointError, match=rf"metrics\.jsonl:{first + 1}: not valid JSON: .*Correct that line.*"
                                              "step-00000002, the newest intact checkpoint, pass --fall-back"):
        start("dpo", output, resume="auto", save_every=2)
    assert content(output) == before
    during()
    start("dpo", output, resume="auto", save_every=2, fall_back=True)
    assert f"skipped checkpoint: {metrics}:{first + 1}" in capsys.readouterr().out
    assert manifest(output)["resumed"][-1]["step"] == 2


def test_a_damaged_record_after_the_checkpoint_is_of_no_account(output: Path, start: Start,
                                                                straight: Callable[..., Path]) -> None:
    """C1: it is cut off, as an incomplete last line is."""
    with (output / "metrics.jsonl").open("ab") as file:
        file.write(bytes(9) + b'\n{"step": 5, "sp')
    start("dpo", output, resume="auto", save_every=2)
    assert_same_run(output, straight("dpo"))


def test_records_that_are_gone(output: Path, start: Start) -> None:
    (output / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: not found: it had [\d,]+ bytes when .*Restore it"):
        start("dpo", output, resume="auto", save_every=2)


def test_records_that_are_damaged_during_the_run_do_not_fail_it(
        start: Start, during: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    during(2, lambda: (tmp_path / "run" / "metrics.jsonl").write_text("{\n"))
    assert start("dpo", tmp_path / "run", max_steps=2).before == {}
    assert "metrics.jsonl:1: not valid JSON" in capsys.readouterr().out
    assert manifest(tmp_path / "run")["status"] == "done"


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("name", ["", "checkpoints/step-00000004", "checkpoints/step-00000004.new"])
def test_a_checkpoint_that_was_not_renamed(name: str, both: bool, output: Path, straight: Callable[..., Path]) -> None:
    """C1: after a kill between COMPLETE and the rename: found by its step, also by path, and `.new` does not stay."""
    place = output / "checkpoints" / "step-00000004"
    shutil.copytree(place, place.with_name("step-00000004.new"))
    if not both:
        shutil.rmtree(place)
    (output / "checkpoints" / "step-00000003.new" / "state").mkdir(parents=True)  # a kill in the middle of a save
    assert main(["resume", str(output / name), "--keep", "0"]) == 0
    assert [path.name for path in sorted((output / "checkpoints").iterdir())] == [
        f"step-{step:08d}" for step in (2, 4, 6, 7)]
    assert_same_run(output, straight("dpo"))


def test_leftovers_are_removed_without_a_checkpoint(output: Path, start: Start) -> None:
    """C1: also if the run starts again at step 1, and saves nothing more."""
    for one in checkpoint.listed(output / "checkpoints"):
        (one.path / "COMPLETE").unlink()
    (output / "checkpoints" / "step-00000006.new").mkdir()
    (output / "checkpoints" / "notes").mkdir()
    start("dpo", output, resume="auto", save_every=None)
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["notes"]


@pytest.mark.parametrize("where", ["deleted", "renamed", "replaced"])
@pytest.mark.parametrize("options", [{"log_every": 1}, {"log_every": 100, "save_every": 3, "eval_every": 100}])
def test_an_output_that_goes_during_a_run(where: str, options: dict[str, Any], start: Start,
                                          during: Callable[..., None], tmp_path: Path) -> None:
    """G5: the run stops at its next record or save, leaves other directories alone, and tells where its own is."""
    output = tmp_path / "run"

    def go() -> None:
        shutil.rmtree(output) if where == "deleted" else output.rename(tmp_path / "moved")
        if where == "replaced":
            output.mkdir()
            (output / "notes.txt").write_text("theirs")

    during(2, go)
    with pytest.raises(OutputError, match="was deleted, renamed or replaced during the run") as error:
        start("dpo", output, **options)
    assert (f"It is {tmp_path / 'moved'} now" in str(error.value)) == (where != "deleted")
    assert [path.name for path in output.iterdir()] == ["notes.txt"] if where == "replaced" else not output.exists()
    during()
    if where == "renamed" and "save_every" not in options:
        assert main(["resume", str(tmp_path / "moved"), "--max-steps", "2"]) == 0
        assert lines(tmp_path / "moved")[-1]["step"] == 2


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no step": lambda trainer: trainer.pop("step"), "another step": lambda trainer: trainer.update(step=9),
    "no offsets": lambda trainer: trainer.pop("offsets"), "offsets": lambda trainer: trainer.update(offsets=[1]),
    "a file outside": lambda trainer: trainer.update(offsets={"../notes": 0}),
    "options": lambda trainer: trainer.update(options=[]), "window": lambda trainer: trainer.update(window={}),
    "fingerprints": lambda trainer: trainer.update(fingerprints={"data": 3}),
    "optimizer": lambda trainer: trainer.update(optimizer=3), "groups": lambda trainer: trainer["optimizer"].clear(),
    "updater": lambda trainer: trainer.update(updater=3), "random": lambda trainer: trainer.update(random={}),
    "guards": lambda trainer: trainer.update(guards=None)}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_checkpoint_with_right_hashes_and_wrong_content(change: str, output: Path, start: Start) -> None:
    """G2: hashes say that nothing changed since it was written, and not what was written."""
    place = output / "checkpoints" / "step-00000004"
    trainer = json.loads((place / "trainer.json").read_text())
    HOSTILE[change](trainer)
    (place / "trainer.json").write_text(json.dumps(trainer))
    seal(place)
    with pytest.raises(TropismError, match=r"step-00000004"):
        start("dpo", output, resume="auto", save_every=2)


def seal(place: Path) -> None:
    """Write the hashes anew."""
    from tropism.observe.checksums import checksums, file_hash

    (place / "files.json").write_text(json.dumps(checksums(place, ("files.json", "COMPLETE"))))
    (place / "COMPLETE").write_text(file_hash(place / "files.json") + "\n")
