"""The small inputs of `tests/cases`, on the command line, against EXPECTED.yaml."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from helpers import CASES, case_yaml, expected
from integration.conftest import assert_same_metrics
from processes import one_rank, run_ranks, start_fork_server
from tropism.cli.app import main
from tropism.config import METHODS
from tropism.config_file import read_yaml
from tropism.errors import UsageError
from tropism.runner import run as train
from tropism.train.frozen.score_store import ScoreStore, entries


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
    assert "--batch-size 1" in err
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


def test_06_on_two_ranks(tiny_model_dir: Path, tmp_path: Path) -> None:
    """K1, K4, X1: the last step of an epoch leaves a rank with a single row of one class; the partners are those of one
    process, and so is every figure. With steps of two rows and three ranks one has none at all."""
    case = case_yaml("06-kto-shuffle-partners.yaml")
    settings = {"model": str(tiny_model_dir), "data": jsonl(tmp_path / "rows.jsonl", case["rows"]), "samples": 0,
                "epochs": case["run"]["epochs"], "seed": case["run"]["seed"], "learning_rate": 1e-3,
                "precision": "fp64"}
    start_fork_server()
    for ranks, batch_size in ((2, case["run"]["world_size"] * case["run"]["per_device_batch"]), (3, 2)):
        own = {**settings, "batch_size": batch_size, "store": str(tmp_path / f"store {ranks}")}
        train(METHODS["kto"](**own, output=str(tmp_path / f"one {ranks}")))
        began = time.monotonic()
        assert run_ranks(ranks, one_rank, [("kto", {**own, "store": str(tmp_path / f"its store {ranks}"),
                                                    "output": str(tmp_path / f"ranks {ranks}")})]) == [0] * ranks
        assert time.monotonic() - began < expected("06")["time_limit_s"]
        found = lines(tmp_path / f"ranks {ranks}")
        assert found[-1]["examples"] == 2 * expected("06")["rows_per_epoch"]
        assert_same_metrics(found, lines(tmp_path / f"one {ranks}"), 0.0, 1e-8)


def test_09_prompt_over_limit(command: Any) -> None:
    """D1, D2: the audit says what was cut; lengths are those of the truncation rule."""
    code, out, err, run = command("kto", CASES / "09-prompt-over-limit.jsonl", "--max-length", "32",
                                  "--batch-size", "3")
    assert code == 0, err
    audit = json.loads((run / "audit.json").read_text())
    assert audit["rows"]["kept"] == 3
    assert audit["rows"]["prompt_cut"] == 1
    assert audit["rows"]["completion_cut"] == 1
    assert "a completion of 1 row was truncated and has no terminator" in out
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


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_18_where_the_reference_comes_from(tiny_model_dir: Path, tmp_path: Path) -> None:
    """R4, R1, L1, X1: live, stored by passes of one row, stored by one pass, and on two ranks: the same run."""
    case, want = case_yaml("18-ref-precompute-vs-online.yaml"), expected("18")
    settings: dict[str, Any] = {
        "model": str(tiny_model_dir), "data": jsonl(tmp_path / "train.jsonl", case["train_rows"]),
        "eval_data": jsonl(tmp_path / "eval.jsonl", case["eval_rows"]), "loss": case["run"]["loss"],
        "beta": case["run"]["beta"], "learning_rate": case["run"]["lr"], "optimizer": case["run"]["optimizer"],
        "batch_size": case["run"]["per_device_batch"], "epochs": case["run"]["epochs"],
        "shuffle": case["run"]["shuffle"], "seed": case["run"]["seed"], "eval_every": 1, "samples": 0}
    variants: list[dict[str, Any]] = [{"reference": "live"}, {"microbatch_tokens": 1}, {"microbatch_tokens": 4096}, {}]
    assert [variant.get("precompute_batch", variant.get("world_size")) for variant in case["variants"]] == [
        None, 1, 5, 2]
    runs = []
    for number, changes in enumerate(variants):
        own = {**settings, **changes, "output": str(tmp_path / f"run{number}"), "store": str(tmp_path / f"s{number}")}
        if case["variants"][number].get("world_size"):
            assert run_ranks(2, one_rank, [("dpo", own)]) == [0, 0]
        else:
            flags = [f"--{name.replace('_', '-')}={str(value).lower() if isinstance(value, bool) else value}"
                     for name, value in own.items()]
            assert main(["dpo", *flags]) == 0
        runs.append(lines(tmp_path / f"run{number}"))
    steps = [line for line in runs[0] if line["split"] == "train"]
    assert [line["examples"] for line in steps] == [2, 4, want["rows"]]
    assert len(steps) == want["steps"]
    assert want["rows"] - steps[-2]["examples"] == want["last_batch_rows"]
    assert steps[0]["loss"] == pytest.approx(want["step1_loss"], abs=1e-6)
    assert steps[0]["rewards/margins"] == pytest.approx(want["step1_margin"], abs=1e-5)
    assert abs(steps[1]["loss"] - want["step1_loss"]) > want["step2_loss_differs_from_ln2_by_more_than"]
    for run in runs[1:]:
        assert [(line["step"], line["split"]) for line in run] == [(line["step"], line["split"]) for line in runs[0]]
        for line, other in zip(run, runs[0], strict=True):
            for key in ("loss", "rewards/margins", "rewards/chosen", "logps/chosen", "logps/rejected"):
                assert line[key] == pytest.approx(other[key], abs=want["max_difference_between_variants_per_step"])
    assert not (tmp_path / "s0").exists()  # a live reference stores nothing
    for number in (1, 2, 3):
        entry, = entries(tmp_path / f"s{number}")
        values = ScoreStore(tmp_path / f"s{number}", entry.path.name, {}).load()
        assert len(values) == 2 * (len(case["train_rows"]) + len(case["eval_rows"]))
        assert all(value < 0 for value in values.values()), want["cached_values"]


CASE_21 = case_yaml("21-pref-loss-table.yaml")
FUSED = CASE_21["configs_that_must_differ_from_default_or_be_refused"]
REFUSED = [*((config, *said) for config, said in zip(CASE_21["configs_that_must_not_start"], (
    ("loss_typ", "loss?"), ("loss", "'sigmiod'"), ("desirable_wieght", "desirable_weight?"), ("beta", "number"),
    ("beta", "greater than 0")), strict=True)), *((config, "fused_loss", "unknown") for config in FUSED)]
"""What must not start, the key that is wrong, and what is said of it."""


def as_flags(config: dict[str, Any]) -> list[str]:
    return [f"--{key.replace('_', '-')}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in config.items() if key != "method"]


@pytest.mark.parametrize(("config", "name", "said"), REFUSED)
def test_21_configurations_that_must_not_start(command: Any, tmp_path: Path, config: dict[str, Any],
                                               name: str, said: str) -> None:
    """H2, L3: refused on the command line and in a file, by name; there is no fused loss that could ignore one."""
    code, _, err, run = command(config["method"], CASES / "01-kto-odd-batch-pairing.jsonl", *as_flags(config))
    assert code == 2
    assert not run.exists()
    assert f"--{name.replace('_', '-')}" in err
    assert said.replace("_", "-") in err
    file = tmp_path / "c.yaml"
    file.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in config.items()))
    with pytest.raises(UsageError) as error:
        read_yaml(file)
    place, _, message = str(error.value).partition(": ")
    assert place == f"{file}:{list(config).index(name) + 1}"
    assert name in message
    assert said in message


PAIRS = [{"prompt": f"Add {n}: ", "chosen": "plum " * (n + 1), "rejected": "brick"} for n in range(4)]
FEEDBACK = [{"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0} for n, row in enumerate(PAIRS)]


@pytest.mark.parametrize("config", FUSED, ids=lambda config: " ".join(map(str, config.values())))
def test_21_without_a_fused_loss_they_differ_from_the_default(command: Any, config: dict[str, Any],
                                                              tmp_path: Path) -> None:
    """L3: on the plain path each of them changes the second step's loss."""
    losses = []
    for number, options in enumerate(({}, {key: value for key, value in config.items() if key != "fused_loss"})):
        rows = FEEDBACK if config["method"] == "kto" else PAIRS
        code, _, err, run = command(config["method"], rows, "--max-steps", "2", "--learning-rate", "0.01",
                                    *as_flags(options))
        assert code == 0, err
        losses.append(lines(run)[-1]["loss"])
        run.rename(tmp_path / f"run-{number}")
    assert abs(losses[0] - losses[1]) > 1e-3
