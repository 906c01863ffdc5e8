"""Sources without an end (H3): how many steps to train must be said, and no more is read than these need."""

import json

import pytest

from tropism import KTOTrainer, SFTTrainer
from tropism.cli.app import main
from tropism.errors import UsageError


class Endless:
    """What `datasets` calls an iterable dataset: it can be begun again, and has no length."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self):
        while True:
            self.taken += 1
            yield {"prompt": f"oak {self.taken}? ", "completion": "elm", "label": self.taken % 2 == 0}


@pytest.mark.parametrize("stream", [Endless(), iter(Endless())])
def test_h3_a_stream_without_max_steps_is_refused_at_once(stream, tiny_model_dir):
    with pytest.raises(UsageError, match="--streaming requires --max-steps"):
        KTOTrainer(str(tiny_model_dir), train_dataset=stream, quiet=True)


def test_h3_an_endless_evaluation_is_refused(tiny_model_dir):
    with pytest.raises(UsageError, match="eval_dataset is a stream"):
        KTOTrainer(str(tiny_model_dir), train_dataset=Endless(), eval_dataset=Endless(), max_steps=2, quiet=True)


@pytest.mark.parametrize("iterator", [True, False])
@pytest.mark.parametrize("trainer", [KTOTrainer, SFTTrainer])
def test_a_stream_is_read_as_far_as_the_steps_need(trainer, iterator, tiny_model_dir, tmp_path):
    stream = Endless()
    trainer(str(tiny_model_dir), train_dataset=iter(stream) if iterator else stream, max_steps=3, batch_size=4,
            output=str(tmp_path / "run"), store=str(tmp_path / "store"), samples=0, quiet=True).fit()
    rows = json.loads((tmp_path / "run" / "audit.json").read_text())["rows"]
    assert rows["kept"] == 12  # of every second one SFT has no use
    assert stream.taken < 50


def test_h3_the_command_line_says_so_too(tiny_model_dir, feedback, tmp_path, capsys):
    args = ["kto", "--model", str(tiny_model_dir), "--data", str(feedback), "--output", str(tmp_path / "run"),
            "--store", str(tmp_path / "store"), "--streaming", "--samples", "0", "--batch-size", "4"]
    assert main(args) == 2
    assert "--streaming requires --max-steps" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main([*args, "--max-steps", "2"]) == 0
    assert json.loads((tmp_path / "run" / "audit.json").read_text())["rows"]["read"] == 8


def test_large_data_show_how_far_they_are_read(feedback, tiny_model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tropism.data.tokenization.encode.BLOCK_ROWS", 10)
    monkeypatch.setattr("tropism.observe.console._FIRST_COUNT", 20)
    monkeypatch.setattr("tropism.observe.console._PAUSE_S", 0.0)
    assert main(["kto", "--model", str(tiny_model_dir), "--data", str(feedback), "--output", str(tmp_path / "run"),
                 "--store", str(tmp_path / "store"), "--max-steps", "1", "--samples", "0"]) == 0
    assert "read 20\nread 40\n" in capsys.readouterr().out
