"""The small inputs of `tests/cases`, on the command line, against EXPECTED.yaml."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers import CASES, case_yaml, expected
from tropism.cli import main


@pytest.fixture
def command(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `tropism METHOD --data FILE ...`; exit code, standard output, standard error, run directory."""
    def go(method: str, data: Path | list[dict[str, Any]], *options: str) -> tuple[int, str, str, Path]:
        if isinstance(data, list):
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in data))
            data = path
        run = tmp_path / "run"
        code = main([method, "--model", str(tiny_model_dir), "--data", str(data), "--output", str(run),
                     "--store", str(tmp_path / "store"), "--samples", "0", *options])
        said = capsys.readouterr()
        return code, said.out, said.err, run

    return go


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_01_odd_batch(command: Any) -> None:
    """K1: five rows in one step; nobody is paired with itself, and the run is as any other."""
    code, _, err, run = command("kto", CASES / "01-kto-odd-batch-pairing.jsonl", "--batch-size", "5")
    assert code == 0, err
    record, = lines(run)
    assert record["examples"] == 5
    assert record["loss"] == pytest.approx(0.5, abs=1e-6)


def test_02_one_sided_batches(command: Any) -> None:
    """K4, K5: a step of one class trains; what the other class would be measured by is absent."""
    want = expected("02")
    code, _, err, run = command(
        "kto", CASES / "02-kto-one-sided-batches.jsonl", "--shuffle", "false", "--batch-size", "4",
        "--learning-rate", "0", "--log-every", "1", "--desirable-weight", str(want["w_desirable"]),
        "--undesirable-weight", str(want["w_undesirable"]))
    assert code == 0, err
    first, second = lines(run)
    assert first["loss"] == pytest.approx(want["step1_loss"], abs=1e-6)
    assert second["loss"] == pytest.approx(want["step2_loss"], abs=1e-6)
    assert first["kl"] == pytest.approx(want["kl_both"], abs=1e-4)
    assert second["kl"] == pytest.approx(want["kl_both"], abs=1e-4)
    assert not set(want["step1_absent_metrics"]) & first.keys()
    assert not set(want["step2_absent_metrics"]) & second.keys()
    assert {"rewards/chosen", "logps/chosen"} <= first.keys()
    assert {"rewards/rejected", "logps/rejected"} <= second.keys()


def test_04_degenerate_sizes(command: Any) -> None:
    """K1, K4: one class is refused with its counts, a batch of one with the reason; a tail of one finds a partner."""
    case = case_yaml("04-kto-degenerate-sizes.yaml")
    code, _, err, run = command("kto", case["a_single_class"]["rows"], "--batch-size", "4")
    assert code == 2
    assert "4 desirable / 0 undesirable" in err
    code, _, err, _ = command("kto", case["b_batch_of_one"]["rows"], "--batch-size", "1")
    assert code == 2
    assert "batch_size 1" in err
    assert not run.exists()
    code, _, err, run = command("kto", case["c_tail_of_one"]["rows"], "--batch-size", "4")
    assert code == 0, err
    assert lines(run)[-1]["examples"] == 5


def test_06_shuffled_epochs(command: Any) -> None:
    """K1, X1: seven rows, two epochs; each row counts once in each."""
    case = case_yaml("06-kto-shuffle-partners.yaml")
    code, _, err, run = command("kto", case["rows"], "--batch-size", "4", "--epochs", "2", "--seed", "11",
                                "--learning-rate", "0")
    assert code == 0, err
    assert lines(run)[-1]["examples"] == 2 * expected("06")["rows_per_epoch"]
    assert lines(run)[-1]["epoch"] == 2.0


def test_09_prompt_over_limit(command: Any) -> None:
    """D1, D2: the audit says what was cut; lengths are those of the truncation rule."""
    code, out, err, run = command("kto", CASES / "09-prompt-over-limit.jsonl", "--max-length", "32",
                                  "--batch-size", "3")
    assert code == 0, err
    audit = json.loads((run / "audit.json").read_text())
    assert audit["rows"]["kept"] == 3
    assert audit["rows"]["prompt_cut"] == 1
    assert audit["rows"]["completion_cut"] == 1
    assert "completions that were cut and have no terminator: 1" in out
    want = expected("09")
    flat = sum(want[q]["prompt_kept"] + want[q]["completion_kept"] for q in ("q1", "q2", "q3"))
    assert audit["tokens"]["flat"] == flat == lines(run)[-1]["tokens"]


def test_10_empty_completions(command: Any) -> None:
    """D3: dropped with line and reason; the run goes on with what is left, or stops under --strict."""
    code, out, err, run = command("dpo", CASES / "10-empty-completions.jsonl")
    assert code == 0, err
    audit = json.loads((run / "audit.json").read_text())
    want = expected("10")
    assert {key: audit["rows"][key] for key in ("read", "kept", "dropped")} == {
        "read": want["read"], "kept": want["kept"], "dropped": want["dropped"]}
    assert "6 read, 1 kept: 3 empty_completion, 1 missing_field, 1 empty_prompt" in out
    assert "10-empty-completions.jsonl:1: empty_completion" in out
    assert lines(run)[0]["loss"] == pytest.approx(0.693147, abs=1e-6)


def test_10_strict(command: Any) -> None:
    """D3: --strict stops at the first row that would be dropped, and leaves nothing behind."""
    code, _, err, run = command("dpo", CASES / "10-empty-completions.jsonl", "--strict")
    assert code == 2
    assert "10-empty-completions.jsonl:1" in err
    assert not run.exists()
