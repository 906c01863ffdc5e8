"""`evaluate` and `score` say which options decide the figures, and what the run itself was trained with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tropism.cli.app import main
from tropism.commands.scoring import score
from tropism.config import METHODS, ScoringOptions
from tropism.model import load
from tropism.runner import run


@pytest.fixture(scope="module")
def base_run(tiny_model_dir: Path, feedback: Path, pairs: Path,
             tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A finished run of a loss."""
    made: dict[str, Path] = {}

    def go(loss: str) -> Path:
        if loss not in made:
            folder = tmp_path_factory.mktemp("runs")
            method, data = ("kto", feedback) if loss == "kto" else ("dpo", pairs)
            run(METHODS[method](model=str(tiny_model_dir), data=str(data), output=str(folder / "run"), loss=loss,
                                store=str(folder / "store"), beta=0.5, max_length=60, max_steps=1, samples=0,
                                max_prompt_length=30))
            made[loss] = folder / "run"
        return made[loss]

    return go


@pytest.fixture
def said(feedback: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The line about the options that scoring a model prints."""
    def go(model: Path | str, **options: Any) -> str:
        capsys.readouterr()
        score(str(model), ScoringOptions(data=str(feedback), store=str(tmp_path / "store"), **options))
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "options in use" in line]
        return line

    return go


def test_a_model(said: Callable[..., str], tiny_model_dir: Path) -> None:
    """Also the values that defaults have become."""
    assert said(tiny_model_dir) == (
        "options in use: --beta 0.1 --max-length 512 --precision fp32, no --reference")


@pytest.mark.parametrize("place", [".", "model"])
def test_a_run_that_was_trained_with_other_options(said: Callable[..., str], base_run: Callable[[str], Path],
                                                   tiny_model_dir: Path, place: str) -> None:
    """Nothing differs silently, and the line holds what to type; also for the model inside of the run."""
    line = said(base_run("kto") / place)
    assert line.startswith("note: options in use: --beta 0.1 --max-length 512 ")
    assert line.endswith(f"The run {base_run('kto')} was trained with --reference {tiny_model_dir} --beta 0.5 "
                         "--max-length 60 --max-prompt-length 30. To measure as the run does, pass the same options.")


def test_a_run_with_its_own_options(said: Callable[..., str], base_run: Callable[[str], Path], tiny_model_dir: Path,
                                    ) -> None:
    """Then there is nothing to note. Another reference is a choice."""
    for reference in (tiny_model_dir, base_run("kto")):
        line = said(base_run("kto"), beta=0.5, max_length=60, max_prompt_length=30, reference=str(reference))
        assert line.startswith("options in use: ")
        assert line.endswith(f", as in the run {base_run('kto')}")


def test_a_loss_without_a_reference_names_none(said: Callable[..., str], base_run: Callable[[str], Path]) -> None:
    assert " trained with --beta 0.5 --max-length 60 " in said(base_run("simpo"))


def edited(run: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a run with other values in config.yaml; None removes one."""
    shutil.copytree(run, folder)
    values = yaml.safe_load((folder / "config.yaml").read_text()) | changes
    (folder / "config.yaml").write_text(yaml.safe_dump({key: value for key, value in values.items() if value != "-"}))
    return folder


def test_options_of_templates(base_run: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str],
                              ) -> None:
    """They are told for data with messages only, since plain text uses no template. A long value is shortened."""
    data = tmp_path / "chats.jsonl"
    data.write_text(json.dumps({"label": True, "messages": [{"role": "user", "content": "Hi"},
                                                            {"role": "assistant", "content": "oak"}]}) + "\n")
    copy = edited(base_run("kto"), tmp_path / "r", system_prompt="Be brief. " * 20, supervise="all")
    score(str(copy), ScoringOptions(data=str(data), store=str(tmp_path / "store"), beta=0.5))
    line, = [line for line in capsys.readouterr().out.splitlines() if "options in use" in line]
    assert " --supervise last --control-tokens plain, no --reference. The run " in line
    assert f" --system-prompt '{'Be brief. ' * 6}...' --supervise all. To measure" in line


def test_a_run_of_defaults(said: Callable[..., str], base_run: Callable[[str], Path], tmp_path: Path) -> None:
    """An option that the run left at its default is named where it is given now."""
    copy = edited(base_run("kto"), tmp_path / "r", max_length=None, max_prompt_length=None, beta=0.1, model="-")
    assert said(copy).endswith(f", as in the run {copy}")
    assert said(copy, max_length=60).endswith("was trained with no --max-length. To measure as the run does, pass the "
                                             "same options.")


@pytest.mark.parametrize("content", [
    "beta: [1", "beta: " + "[" * 5000, "method: dpo\nloss_weights: 1,2\n", "unknown: 1\n", "- 1\n",
    "method: other\n", "beta: !!python/name:os.system\n"])
def test_a_config_that_cannot_be_read(said: Callable[..., str], base_run: Callable[[str], Path], tmp_path: Path,
                                      content: str) -> None:
    """The figures are printed all the same, and the line says that the run's options are unknown."""
    copy = edited(base_run("kto"), tmp_path / "r")
    (copy / "config.yaml").write_text(content)
    line = said(copy)
    assert f"The options of the run are unknown: {copy / 'config.yaml'}:" in line
    assert line.count("config.yaml") == 1


def test_the_run_permits_no_code(said: Callable[..., str], base_run: Callable[[str], Path], tmp_path: Path,
                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the option that is typed does."""
    copy = edited(base_run("kto"), tmp_path / "r", trust_remote_code=True)
    real, asked = load.load_config, []

    def watched(source: Any, *, trust_remote_code: bool) -> Any:
        asked.append(trust_remote_code)
        return real(source, trust_remote_code=trust_remote_code)

    monkeypatch.setattr(load, "load_config", watched)
    said(copy)
    assert asked
    assert not any(asked)


def test_the_metrics_are_those_of_the_options_in_use(base_run: Callable[[str], Path], tmp_path: Path, feedback: Path,
                                                     ) -> None:
    """The JSON file has them too."""
    assert main(["evaluate", str(base_run("kto")), "--data", str(feedback), "--json", str(tmp_path / "f.json")]) == 0
    assert json.loads((tmp_path / "f.json").read_text())["beta"] == 0.1
