"""`--profile N`: a table and a trace of some steps, which change no result."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tropism.commands.verify import verify
from tropism.model.language_model import LanguageModel
from tropism.spans import PREFIX, STEP
from tropism.train import loop
from tropism.train.profile_table import step_times

Train = Callable[..., Any]


def spans(directory: Path) -> list[str]:
    events = json.loads((directory / "profile.json").read_text())["traceEvents"]
    return [event["name"] for event in events if event["name"].startswith(PREFIX)]


def test_a_profile_changes_nothing(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    plain, profiled = train("kto", max_steps=5), train("kto", max_steps=5, profile=2)
    one, other = (result.model / "model.safetensors" for result in (plain, profiled))
    assert one.read_bytes() == other.read_bytes()
    out = capsys.readouterr().out
    assert "profile: 2 optimizer steps from the 3rd of this process\n" in out
    assert f"profile: {profiled.directory / 'profile.json'}; open it in https://ui.perfetto.dev" in out
    found = spans(profiled.directory)
    assert found.count(STEP) == 2
    wanted = ["data", "forward", "attention", "head", "backward", "optimizer"]
    assert set(found) >= {PREFIX + name for name in wanted}
    times = step_times(json.loads((profiled.directory / "profile.json").read_text())["traceEvents"], 2)
    assert all(times.parts[name] > 0 for name in wanted)
    assert sum(times.parts.values()) == pytest.approx(times.seconds)
    assert not (plain.directory / "profile.json").exists()


@pytest.mark.parametrize(("steps", "wanted", "said", "count"), [
    (1, 1, "1 optimizer step from the 1st of this process\n", 1),
    (2, 9, "1 optimizer step from the 2nd of this process, of 9 requested: the run has no more\n", 1),
    (4, 9, "2 optimizer steps from the 3rd of this process, of 9 requested: the run has no more\n", 2)])
def test_a_short_run_profiles_what_there_is(train: Train, capsys: pytest.CaptureFixture[str], steps: int, wanted: int,
                                            said: str, count: int) -> None:
    result = train("kto", max_steps=steps, profile=wanted, layout="padded", prefetch=1)
    assert f"profile: {said}" in capsys.readouterr().out
    times = step_times(json.loads((result.directory / "profile.json").read_text())["traceEvents"], count)
    assert times.parts["attention"] > 0


def test_a_resumed_run_is_profiled_and_verified(train: Train) -> None:
    straight = train("kto", max_steps=5, save_every=2, keep=0)
    before = (straight.model / "model.safetensors").read_bytes()
    output = straight.directory
    train("kto", max_steps=5, save_every=2, keep=0, output=str(output), profile=1,
          resume=str(output / "checkpoints" / "step-00000002"))
    assert spans(output).count(STEP) == 1
    assert (straight.model / "model.safetensors").read_bytes() == before
    assert verify(output).intact


def test_what_stands_in_its_place_is_refused_at_the_start(train: Train, tmp_path: Path) -> None:
    result = train("kto", max_steps=1)
    (result.directory / "profile.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Exception, match=r"profile.json is a symbolic link"):
        train("kto", output=str(result.directory), resume="auto", profile=1)
    assert not (tmp_path / "elsewhere").exists()


def test_a_start_with_stored_scores_computes_little(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before step 1: the comparison of layouts, a sample of the stored scores, and the first step's margins. Nothing
    is scored twice."""
    train("kto", max_steps=1)
    passes: list[str] = []
    before, stepped = LanguageModel._hidden, loop.train_step
    monkeypatch.setattr(LanguageModel, "_hidden", lambda *args: [passes.append("pass"), before(*args)][1])
    monkeypatch.setattr(loop, "train_step", lambda *args: [passes.append("step"), stepped(*args)][1])
    train("kto", max_steps=1)
    assert passes[: passes.index("step")] == ["pass"] * 3
