"""Runs on prompts that are truncated: what counts as the same prompt from the data to a resumed run."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tropism.config import KTOOptions
from tropism.distributed import World
from tropism.errors import CheckpointError, UsageError
from tropism.runner import Run, run
from tropism.trainers import KTOTrainer


def rows(prompts: int) -> list[dict[str, Any]]:
    """Labeled completions of all lengths."""
    return [{"prompt": f"oak {number % prompts} " + "elm " * 20 + "? ", "completion": "ash " * (1 + 3 * number % 20),
             "label": number % 3 == 0} for number in range(40)]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[int], Path]:
    """A file of rows with that many prompts."""
    def go(prompts: int) -> Path:
        path = tmp_path / f"{prompts}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows(prompts)))
        return path

    return go


@pytest.mark.parametrize("max_length", [40, 70, 100, 128])
def test_data_with_one_prompt_is_refused(train: Callable[..., Any], write: Callable[[int], Path],
                                         max_length: int) -> None:
    """K4: at any limit, also where the cut makes many prompts of it."""
    with pytest.raises(UsageError, match="all 40 rows have the same prompt"):
        train("kto", data=str(write(1)), max_length=max_length)
    with pytest.raises(UsageError, match="--eval-fraction: all rows have the same prompt"):
        train("kto", data=str(write(1)), max_length=max_length, eval_fraction=0.5)


def test_held_out_rows_of_one_prompt_have_no_reference_point(train: Callable[..., Any], write: Callable[[int], Path],
                                                             ) -> None:
    """K1: nor does one appear when they are cut in several ways."""
    result = train("kto", data=str(write(4)), eval_data=str(write(1)), max_length=70, max_steps=1)
    evaluated = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert not [key for line in evaluated if line["split"] == "eval" for key in line if key.startswith("kl")]


def test_a_run_of_the_earlier_comparison_is_not_resumed(tiny_model_dir: Path, write: Callable[[int], Path],
                                                        tmp_path: Path) -> None:
    """C1: with truncated prompts it would take other steps, so its fingerprint of the data is another one."""
    options = KTOOptions(model=str(tiny_model_dir), data=str(write(4)), output=str(tmp_path / "run"), max_length=70,
                         store=str(tmp_path / "store"), batch_size=8, max_steps=2, save_every=1, samples=0)
    run(options)
    again = options.model_copy(update={"resume": "auto", "max_steps": 3})
    manifest = tmp_path / "run" / "manifest.json"
    found = json.loads(manifest.read_text())
    digest = hashlib.blake2b(digest_size=16)
    for row in Run(options, World(0, 1, torch.device("cpu"))).inputs.data.train:
        for part in (row.prompt_ids.tobytes(), row.completions[0].key, str(row.desirable).encode()):
            digest.update(part)
    before = found["fingerprints"] | {"data": digest.hexdigest()}
    assert before != found["fingerprints"]
    manifest.write_text(json.dumps(found | {"fingerprints": before}))
    with pytest.raises(CheckpointError, match=r"cannot resume: .*the training data"):
        run(again)
    manifest.write_text(json.dumps(found))
    assert run(again).steps == 3


class DataFrame:
    """As a table of pandas, which no `==` or truth value may see."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records
        self.columns = list(records[0])

    def __len__(self) -> int:
        return len(self.records)

    def __iter__(self) -> Any:
        return iter(self.columns)

    def __eq__(self, other: object) -> Any:
        return self

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise ValueError("the truth value of a DataFrame is ambiguous")

    def itertuples(self, index: bool, name: None) -> Any:
        return (tuple(record.values()) for record in self.records)


@pytest.mark.parametrize("fails", [False, True])
def test_a_table_of_pandas_trains(tiny_model_dir: Path, tmp_path: Path, fails: bool,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Its labels may be floats; a failed run is recorded as any other."""
    records = [{**row, "label": float(row["label"])} for row in rows(4)]
    trainer = KTOTrainer(str(tiny_model_dir), train_dataset=DataFrame(records), eval_dataset=DataFrame(records),
                         output=str(tmp_path / "run"), store=str(tmp_path / "store"), max_steps=1, batch_size=8,
                         samples=0, quiet=True)
    if not fails:
        assert trainer.fit().steps == 1
        return
    monkeypatch.setattr("tropism.train.loop.TrainingLoop.steps", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "failed"
