"""`tropism convert`: what it says, its exit codes, and real data."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tropism.cli.app import main
from tropism.data.formats import recognize, rows_of_record
from tropism.data.sources.resolve import read

PAIRS = [{"id": "a", "prompt": "p", "chosen": "x", "rejected": "y", "source": "s"},
         {"prompt": "q", "chosen": "x", "rejected": " "}]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main(["convert", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_what_it_says(capsys: pytest.CaptureFixture[str], pairs: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "labels.jsonl"
    code, out, err = run(capsys, pairs, "--to", "unpaired", "--output", output, "--json", tmp_path / "account.json")
    assert code == 0, err
    begins = [
        f"{pairs}: 2 read, 3 rows written as unpaired (prompt, completion, label)",
        "  read as trl (prompt, chosen, rejected), each pair as a desirable and an undesirable row; override with "
        "--format and --columns",
        "  dropped: 1 empty_completion",
        "    pairs.jsonl:2: empty_completion: 'rejected' is empty",
        "  dropped columns: source (1 record); --keep-columns",
        "  not in the file (1): one side of a pair; --pair-by-prompt",
        "  changed (1): each pair became two rows with the same prompt; --pair-by-prompt",
        f"{output}: 3 rows"]
    assert all(line.startswith(begin) for line, begin in zip(out.splitlines(), begins, strict=True)), out
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {"id": "a", "prompt": "p", "completion": "x", "label": True},
        {"id": "a#2", "prompt": "p", "completion": "y", "label": False},
        {"prompt": "q", "completion": "x", "label": True}]
    account = json.loads((tmp_path / "account.json").read_text())
    assert account["rows"] == {"read": 2, "written": 3, "dropped": {"empty_completion": 1}}
    assert account["dropped_rows"][0]["place"] == "pairs.jsonl:2"
    assert account["columns"]["left_behind"] == {"source": 1}


def test_many_rows_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The first few are shown, the others counted; --json has them."""
    data = tmp_path / "d.jsonl"
    data.write_text("".join(json.dumps({"prompt": "p", "completion": "c" if number == 8 else ""}) + "\n"
                            for number in range(9)))
    code, out, _ = run(capsys, data, "--to", "single", "--output", tmp_path / "o.jsonl", "--json", tmp_path / "o.json")
    assert code == 0
    assert out.count("empty_completion: 'completion' is empty") == 5
    assert "    and 3 more; --json lists" in out
    assert len(json.loads((tmp_path / "o.json").read_text())["dropped_rows"]) == 8


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["--to", "unpaired", "--output", "pairs.jsonl"], "pairs.jsonl already exists"),
    (["--to", "unpaired", "--output", "o.txt"], "o.txt: unsupported file type. Use .jsonl, .jsonl.gz,"),
    (["--to", "unpaired", "--output", "o.jsonl", "--strict"],
     "pairs.jsonl:2: empty_completion: 'rejected' is empty (--strict)"),
    (["--to", "triples", "--output", "o.jsonl"], "triples"),
    (["--to", "paired", "--output", "o.jsonl", "--turns", "all"], "--turns has no effect with --to paired"),
    (["--to", "paired", "--output", "o.jsonl", "--pair-by-prompt"], "--pair-by-prompt has no effect"),
    (["--to", "paired", "--output", "o.jsonl", "--label-threshold", "2"], "--label-threshold has no effect"),
    (["--to", "messages", "--output", "o.csv"], "CSV holds plain text only"),
    (["--output", "o.jsonl"], "--to"),
    (["--to", "paired"], "--output"),
])
def test_refusals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pairs: Path, tmp_path: Path,
                  arguments: list[str], sentence: str) -> None:
    """Exit code 2, and the directory is as it was."""
    monkeypatch.chdir(tmp_path)
    before = pairs.read_bytes()
    code, _, err = run(capsys, "pairs.jsonl", *arguments)
    assert code == 2
    assert sentence in err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]
    assert pairs.read_bytes() == before


def test_it_needs_no_torch(pairs: Path, tmp_path: Path) -> None:
    code = (f"import sys; from tropism.cli.app import main\n"
            f"code = main(['convert', {str(pairs)!r}, '--to', 'single', '--output', {str(tmp_path / 'o.jsonl')!r}])\n"
            "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\nsys.exit(code)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o.jsonl").exists()


def test_a_converted_file_trains(capsys: pytest.CaptureFixture[str], feedback: Path, tiny_model_dir: Path,
                                 tmp_path: Path) -> None:
    """The same ids and labels reach the model: an inspection finds the same rows."""
    from tropism.commands.inspect import inspect
    from tropism.config import InspectOptions

    options = InspectOptions(model=str(tiny_model_dir), method="kto")
    before = inspect(str(feedback), options).to_json()
    for kind in (".jsonl.gz", ".parquet", ".csv"):
        output = tmp_path / f"o{kind}"
        assert run(capsys, feedback, "--to", "unpaired", "--output", output)[0] == 0
        after = inspect(str(output), options).to_json()
        assert after["labels"] == before["labels"]
        assert after["histograms"] == before["histograms"]
        assert [(row["prompt"], row["completions"]) for row in after["shown"]] == [
            (row["prompt"], row["completions"]) for row in before["shown"]]


@pytest.mark.some(1)
@pytest.mark.parametrize("name", [
    "lf_dpo_en", "lf_kto_en", "llmbar_pairs", "oasst_tree_kto", "oasst_tree_pairs", "pandalm_human_kto",
    "pandalm_human_pairs", "qa_feedback_kto", "qa_feedback_pairs", "qa_feedback_sft", "selfinstruct_human_sft",
    "tulu_human_accept_kto", "tulu_human_pairs"])
def test_real_data(capsys: pytest.CaptureFixture[str], test_data: Path, tmp_path: Path, name: str) -> None:
    """Every shape that the data can have, read again as the rows that they were; pairs also by way of single rows."""
    data = test_data / "data" / f"{name}.jsonl"
    view = "paired" if "chosen" in next(iter(read(data))).record else "unpaired" if "kto" in name else "single"
    for to in {"paired": ("unpaired", "paired"), "unpaired": ("unpaired", "single"), "single": ("single",)}[view]:
        before = _content(data, to)
        for kind in (".jsonl", ".parquet"):
            output = tmp_path / f"{to}{kind}"
            code, out, err = run(capsys, data, "--to", to, "--output", output)
            assert code == 0, err
            assert f"{output}: {len(before):,} rows" in out
            assert sorted(_content(output, to)) == sorted(before)
    assert run(capsys, data, "--to", "messages", "--output", tmp_path / "messages.jsonl.gz")[0] == 0
    if view == "paired" and len(_content(data, "unpaired")) == 2 * len(_content(data, "paired")):
        code, out, _ = run(capsys, tmp_path / "unpaired.parquet", "--to", "paired", "--pair-by-prompt", "--output",
                           tmp_path / "again.jsonl")
        assert sorted(_content(tmp_path / "again.jsonl", "paired")) == sorted(_content(data, "paired"))


def _content(path: Path, view: Any) -> list[tuple[str, ...]]:
    """Rows as text: prompt, completions, label."""
    records = list(read(path))
    reading = recognize(records, view, "f")
    rows = [row for record in records for row in rows_of_record(record, reading)]
    return [tuple(json.dumps(part, sort_keys=True) for part in (row.prompt, *row.completions, row.desirable))
            for row in rows if hasattr(row, "completions")]
