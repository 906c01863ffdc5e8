"""Options from files and from the command line together."""

from pathlib import Path

import pytest

from integration.test_cli import BASE, run, small
from tropism.cli.arguments import with_config


@pytest.mark.parametrize(("flags", "beta"), [
    ([], 0.3), (["--loss", "sigmoid"], 0.3), (["--loss=sigmoid"], 0.3), (["--loss", "ipo"], 0.1),
    (["--loss", "ipo", "--beta", "0.4"], 0.4),
])
def test_another_loss_does_not_inherit_the_options_of_the_files(flags: list[str], beta: float, tmp_path: Path,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    """A beta that was meant for one loss is not passed on to another in silence; the same loss keeps it."""
    config = tmp_path / "c.yaml"
    config.write_text("method: dpo\nloss: [sigmoid]\nbeta: 0.3\nlabel_smoothing: 0.1\n")
    given = with_config(["train", str(config), *BASE, *flags])
    parsed = {token.partition("=")[0]: token.partition("=")[2] for token in given if "=" in token}
    betas = [float(parsed["--beta"])] if "--beta" in parsed else []
    betas += [float(given[place + 1]) for place, token in enumerate(given) if token == "--beta"]
    assert (betas or [0.1])[-1] == beta
    assert ("belong to its loss" in capsys.readouterr().err) == ("ipo" in "".join(flags))


def test_a_teacher_is_never_live_by_name(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path, feedback: Path,
                                         tmp_path: Path) -> None:
    """`live` is a word for references; as a teacher it is a model that is not there."""
    code, _, err = run(capsys, "kto", *small(tiny_model_dir, feedback, tmp_path), "--teacher", "live")
    assert code == 2
    assert "live: directory not found" in err
