"""Options of files spelled out before those that the command line gives."""

from pathlib import Path

import pytest

from tropism.cli.arguments import spelled_out


@pytest.mark.parametrize("flag", ["--lora.no-dora", "--no-lora.dora", "--lora.dora", "--lora.dora=false"])
def test_what_the_command_line_gives_is_not_given_twice(tmp_path: Path, flag: str) -> None:
    """X1: also where it is an option of a group, and turned off."""
    file = tmp_path / "run.yaml"
    file.write_text("method: sft\nmodel: m\ndata: d\noutput: o\nlora:\n  rank: 2\n  dora: true\nshuffle: true\n"
                    "parallel:\n  offload: true\n")
    tokens = spelled_out(["train", str(file), flag, "--no-shuffle", "--parallel.no_offload"])
    assert [token for token in tokens if "dora" in token] == [flag]
    assert "--lora.rank=2" in tokens
    assert not {"--shuffle=true", "--parallel.offload=true"} & set(tokens)


@pytest.mark.parametrize(("given", "processes", "kept", "said"), [
    ([], 1, [], "has parallel.tensor 2 and parallel.reduce_once true, which does not fit 1 process"),
    (["--parallel.tensor", "2"], 1, ["--parallel.reduce-once=true"], ""),
    (["--parallel.no-reduce-once"], 1, [], "has parallel.tensor 2, which"),
    ([], 4, ["--parallel.reduce-once=true", "--parallel.tensor=2"], "")])
def test_resume_leaves_out_what_does_not_fit_its_processes(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: list[str],
        processes: int, kept: list[str], said: str) -> None:
    """C2: another number of processes is no obstacle; what the command line gives stays, whatever comes of it."""
    (tmp_path / "config.yaml").write_text("method: sft\nmodel: m\ndata: d\noutput: o\nparallel:\n  tensor: 2\n"
                                          "  shard: null\n  offload: false\n  reduce_once: true\n")
    for name, value in (("WORLD_SIZE", processes), ("RANK", 0), ("MASTER_ADDR", "h"), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    tokens = spelled_out(["resume", str(tmp_path), *given])
    found = [token for token in tokens if token.startswith("--parallel") and token not in given]
    assert sorted(set(found) - {"--parallel.offload=false"}) == kept
    error = capsys.readouterr().err
    assert said in error if said else not error


def test_a_note_spells_a_list_of_losses_as_the_command_line_does(tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    """X1: and not as Python does."""
    file = tmp_path / "run.yaml"
    file.write_text("method: dpo\nloss: [sigmoid, sft]\nloss_weights: [1, 0.2]\n")
    assert not [token for token in spelled_out(["train", str(file), "--loss", "ipo"]) if "weights" in token]
    assert "ignoring loss_weights, which belong to its loss sigmoid,sft" in capsys.readouterr().err
