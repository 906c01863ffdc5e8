"""Datasets of a hub on loopback: revisions, and rows that are streamed as they are needed."""

import builtins
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import fake_hub
from tropism.cli.app import main
from tropism.data.sources.resolve import SplitChoice, resolve_source
from tropism.errors import DataError

ROWS = [{"prompt": f"q{number % 50}", "completion": f" a{number}" + "x" * 90, "label": number % 3 > 0}
        for number in range(200)]
CARD = ("---\nconfigs:\n- config_name: small\n  data_files:\n  - split: train\n    path: small.jsonl\n"
        "- config_name: large\n  default: true\n  data_files:\n  - split: train\n    path: train.jsonl\n"
        "  - split: test\n    path: test.jsonl\n---\n")


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


FILES = {"README.md": CARD.encode(), "train.jsonl": lines(ROWS), "test.jsonl": lines(ROWS[:7]),
         "small.jsonl": lines(ROWS[:3])}


@pytest.fixture
def streams(hub: fake_hub.Hub, monkeypatch: pytest.MonkeyPatch) -> fake_hub.Hub:
    """The hub, as the library `datasets` asks it."""
    datasets = pytest.importorskip("datasets", reason="streaming needs the package datasets")
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
    for name in ("STREAMING_READ_RETRY_INTERVAL", "STREAMING_OPEN_RETRY_INTERVAL"):
        monkeypatch.setattr(datasets.config, name, 0)
    monkeypatch.setattr(datasets.config, "STREAMING_READ_MAX_RETRIES", 3)
    return hub


def places(name: str, split: SplitChoice | None = None, stream: bool = True) -> list[str]:
    return [row.place for part in resolve_source(name, split=split, stream=stream) for row in part.read()]


def test_a_stream_is_read_by_split_and_configuration(streams: fake_hub.Hub) -> None:
    streams.add("some/rows", FILES, "dataset")
    assert places("some/rows") == [f"some/rows:large/train:row {number}" for number in range(1, 201)]
    assert places("some/rows", SplitChoice(held_out=True))[-1] == "some/rows:large/test:row 7"
    assert places("some/rows", SplitChoice("small/train"))[-1] == "some/rows:small/train:row 3"
    assert len(places("some/rows:2", SplitChoice("test"))) == 14
    with pytest.raises(DataError, match=r"--split dev: no split of this name. Splits: train, test"):
        places("some/rows", SplitChoice("dev"))
    part = resolve_source("some/rows", stream=True)[0]
    assert part.split == ("split train (also there: test; choose with --split) of configuration large (also there: "
                          "small; choose with --split CONFIGURATION/train)")
    assert [row.record for row in part.read()] == ROWS


def test_only_what_is_needed_is_sent(streams: fake_hub.Hub) -> None:
    many = lines([{**row, "completion": row["completion"] * 200} for row in ROWS] * 20)
    streams.add("some/many", {"train.jsonl": many}, "dataset")
    rows = resolve_source("some/many", stream=True)[0].read()
    assert next(rows).place == "some/many:train:row 1"
    assert 0 < streams.sent < len(many) / 2


@pytest.mark.parametrize("times", [1, 999])
def test_a_stream_whose_connection_drops(streams: fake_hub.Hub, times: int) -> None:
    """It is retried, and every row comes once; if it stays away, that is an error with the place."""
    streams.add("some/rows", {"train.jsonl": lines(ROWS * 60)}, "dataset")
    stream = resolve_source("some/rows", stream=True)[0].read()
    streams.drop("GET /datasets/some/rows/resolve", times)
    if times == 1:
        assert [row.record for row in stream] == ROWS * 60
        assert streams.drops[0][1] == 0
    else:
        with pytest.raises(DataError, match=r"some/rows:train: reading from the Hub failed after row [\d,]+ \("):
            list(stream)


def test_a_run_streams_what_its_steps_need(streams: fake_hub.Hub, tiny_model_dir: Path, tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """It records the commit, whatever its branch names later; a failed stream leaves no run directory."""
    first = streams.add("some/rows", FILES, "dataset")
    command = ["kto", "--model", str(tiny_model_dir), "--data", "some/rows", "--streaming", "--max-steps", "2",
               "--batch-size", "8", "--store", str(tmp_path / "store"), "--no-report"]
    assert main([*command, "--output", str(tmp_path / "run")]) == 0
    assert json.loads((tmp_path / "run" / "audit.json").read_text())["rows"]["read"] == 16
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert f"data: some/rows@{first}\n" in config
    streams.drop(f"GET /datasets/some/rows/resolve/{first}/train", 999)
    assert main([*command, "--output", str(tmp_path / "other")]) == 2
    assert "some/rows: the dataset cannot be streamed from the Hub (ConnectionError: " in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_without_the_library_a_stream_is_refused(hub: fake_hub.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("some/rows", FILES, "dataset")
    known = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *given, **named: (
        known("not_there") if name == "datasets" else known(name, *given, **named)))
    with pytest.raises(DataError, match=r"needs the package datasets\. Install .*'tropism\[datasets\]'`"):
        places("some/rows")
    assert len(places("some/rows", stream=False)) == 200


def test_a_revision_of_downloaded_data(hub: fake_hub.Hub, tmp_path: Path) -> None:
    """By branch, tag or commit, with a weight after it; its commit is known."""
    old = hub.add("some/rows", {"train.jsonl.gz": gzip.compress(lines(ROWS[:4]))}, "dataset", "v1.0")
    new = hub.add("some/rows", {"train.jsonl": lines(ROWS[:9])}, "dataset")
    for name, count, commit in (("some/rows", 9, new), ("some/rows@v1.0", 4, old), (f"some/rows@{old}", 4, old),
                                ("some/rows@v1.0:2", 8, old)):
        assert len(places(name, stream=False)) == count
        assert resolve_source(name)[0].commit == commit
    with pytest.raises(DataError, match="some/rows@v9: file not found, and the dataset could not be downloaded"):
        places("some/rows@v9", stream=False)
