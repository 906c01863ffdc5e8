"""Options of files spelt out before those that the command line gives."""

from pathlib import Path

import pytest

from tropism.arguments import spelt_out


@pytest.mark.parametrize("flag", ["--lora.no-dora", "--no-lora.dora", "--lora.dora", "--lora.dora=false"])
def test_what_the_command_line_gives_is_not_given_twice(tmp_path: Path, flag: str) -> None:
    """X1: also where it is an option of a group, and turned off."""
    file = tmp_path / "run.yaml"
    file.write_text("method: sft\nmodel: m\ndata: d\noutput: o\nlora:\n  rank: 2\n  dora: true\nshuffle: true\n"
                    "parallel:\n  offload: true\n")
    tokens = spelt_out(["train", str(file), flag, "--no-shuffle", "--parallel.no_offload"])
    assert [token for token in tokens if "dora" in token] == [flag]
    assert "--lora.rank=2" in tokens
    assert not {"--shuffle=true", "--parallel.offload=true"} & set(tokens)
