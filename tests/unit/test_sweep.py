"""Sweeps: which values and combinations a command names, their record, and what becomes of each run."""

import json
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from tropism.cli.app import main
from tropism.commands.sweep import processes
from tropism.commands.sweep.plan import runs_of
from tropism.commands.sweep.values import combinations, read_values, typed
from tropism.config import DPOOptions, KTOOptions, MethodOptions
from tropism.errors import UsageError
from tropism.observe.lock import owned
from tropism.report.held_out import held_out
from tropism.report.read import RunReport
from tropism.train.evaluation.row_files import SCHEMA


def names(text: str, options: type[MethodOptions] = DPOOptions) -> list[str]:
    return [one.name for one in combinations(read_values(text.split(), options), options)]


def test_the_first_option_changes_slowest() -> None:
    assert names("--learning-rate 1e-6,5e-6 --seed 0,1 --beta=0.2") == [
        "learning-rate=1e-6_seed=0", "learning-rate=1e-6_seed=1", "learning-rate=5e-6_seed=0",
        "learning-rate=5e-6_seed=1"]


@pytest.mark.parametrize(("text", "wanted"), [
    ("--loss sigmoid --loss sigmoid,sft", {"loss": ["sigmoid", "sigmoid,sft"]}),
    ("--seed 0 --seed 1,2", {"seed": ["0", "1", "2"]}),
    ("--data a.jsonl,b.jsonl --data=c.jsonl", {"data": ["a.jsonl,b.jsonl", "c.jsonl"]}),
    ("--learning_rate -1,-2e-6", {"learning-rate": ["-1", "-2e-6"]}),
    ("--wpo --no-shuffle --group-prompts true,false", {"wpo": ["true"], "shuffle": ["false"],
                                                       "group-prompts": ["true", "false"]}),
    ("--no-lora.dora --lora.rank none,8", {"lora.dora": ["false"], "lora.rank": ["none", "8"]}),
    ("--model a/b,c/d", {"model": ["a/b", "c/d"]}),
])
def test_values_are_read(text: str, wanted: dict[str, list[str]]) -> None:
    found = read_values(text.split(), DPOOptions)
    assert found == wanted
    assert read_values(shlex.split(typed(found)), DPOOptions) == wanted


def test_spaces_are_not_part_of_a_value_but_of_a_text() -> None:
    found = read_values(["--seed", " 0, 1 ", "--system-prompt", "Be kind, be brief."], KTOOptions)
    assert found == {"seed": ["0", "1"], "system-prompt": ["Be kind, be brief."]}


@pytest.mark.parametrize(("tokens", "error"), [
    (["--seed", "0,", "1"], "a value in '0,' is empty"), (["--seed", ",0"], "is empty"), (["--seed="], "is empty"),
    (["--seed"], "--seed needs a value"), (["--seed", "--beta"], "--seed needs a value"),
    (["--seed", "0,0"], "0 is given twice"), (["--seed", "0", "1"], "unexpected argument 1"),
])
def test_values_that_cannot_be_read(tokens: list[str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        read_values(tokens, KTOOptions)


def test_names_are_safe_distinct_and_stable() -> None:
    values = ["a/b", "a b", "../..", "x" * 300, "é\x1b[31m", "sigmoid,sft", "sigmoid", "1e+5"]
    found = [one.name for one in combinations({"system-prompt": values}, KTOOptions)]
    assert len({*found}) == len(values)
    assert all("/" not in name and name.isascii() and name.isprintable() and " " not in name for name in found)
    assert found[5:] == ["system-prompt=sigmoid+sft", "system-prompt=sigmoid", "system-prompt=1e+5"]
    assert [one.name for one in combinations({"system-prompt": values[:3]}, KTOOptions)] == found[:3]
    many = {name: ["1.000000000001", "2"] for name in KTOOptions.flat_fields()}
    assert len(next(iter(combinations({name: many[name] for name in list(many)[:8]}, KTOOptions))).name) < 200


def test_none_unsets_an_option_only_where_it_is_no_word_of_it() -> None:
    rank = combinations({"lora.rank": ["none", "8"]}, KTOOptions)
    assert [(one.given, one.unset) for one in rank] == [((), ("lora.rank",)), (("--lora.rank=8",), ())]
    assert combinations({"checkpointing": ["none", "full"]}, KTOOptions)[0].given == ("--checkpointing=none",)
    assert combinations({"store-limit": ["none", "1GB"]}, KTOOptions)[0].given == ("--store-limit=none",)


def test_too_many_or_too_few_combinations() -> None:
    with pytest.raises(UsageError, match="600 combinations are too many"):
        combinations({"seed": list(map(str, range(600)))}, KTOOptions)
    with pytest.raises(UsageError, match="no option has several values"):
        combinations({"seed": ["0"]}, KTOOptions)


# --- whole commands, whose runs are small scripts ---------------------------------------------------------------------

SCRIPT = """
import json, os, pathlib, signal, sys, time
words = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--") and "=" in word)
path = pathlib.Path(sys.argv[2] if sys.argv[1] == "resume" else words["output"])
with open("calls", "a") as calls:
    calls.write(" ".join(sys.argv[1:2]) + " " + path.name + chr(10))
told = pathlib.Path("tell-" + path.name)
answer = told.read_text() if told.exists() else "done"
path.mkdir(parents=True, exist_ok=True)
(path / "words").write_text(" ".join(sys.argv[1:]))
def end(status, code):
    (path / "config.yaml").write_text("method: kto")
    (path / "manifest.json").write_text(json.dumps({"status": status, "steps": 1, "seconds": 1.0}))
    sys.exit(code)
print("hello", path.name, flush=True)
if answer == "wait":
    signal.signal(signal.SIGINT, lambda *_: end("stopped", 75))
    print("ready", flush=True)
    time.sleep(60)
if answer == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if answer == "fail":
    print("tropism: no luck", file=sys.stderr)
    end("failed", 1)
end("stopped" if answer == "time" else "done", 75 if answer == "time" else 0)
"""


@pytest.fixture
def base(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration in an empty current directory. Runs are scripts that do what a file tells them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes, "_COMMAND", (sys.executable, "-c", SCRIPT))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    file = tmp_path / "base.yaml"
    file.write_text(f"method: kto\nmodel: {tiny_model_dir}\ndata: rows.jsonl\nbeta: 0.3\n")
    return file


def sweep(capsys: pytest.CaptureFixture[str], *tokens: str) -> tuple[int, str, str]:
    code = main(list(tokens))
    return code, *capsys.readouterr()


def calls() -> list[str]:
    found = Path("calls").read_text().splitlines() if Path("calls").exists() else []
    Path("calls").unlink(missing_ok=True)
    return found


SEEDS = ("sweep", "base.yaml", "--seed", "0,1,2", "--output", "out")


def test_runs_that_fail_stop_or_are_killed_do_not_stop_the_others(base: Path, capsys: Any) -> None:
    for seed, answer in enumerate(("fail", "killed", "time")):
        Path(f"tell-seed={seed}").write_text(answer)
    code, out, err = sweep(capsys, "sweep", "base.yaml", "--seed", "0,1,2,3", "--output", "out")
    assert code == 1
    assert "2 of 4 runs failed: seed=0, seed=1. The others are not affected. To try again: tropism resume out" in err
    assert "run 3 of 4: seed=2\n  hello seed=2\n" in out
    assert "warning: seed=0 failed: no luck" in out
    assert "ended by SIGKILL" in out
    lines = [json.loads(line) for line in Path("out/sweep.jsonl").read_text().splitlines()]
    assert [(line["seed"], line["status"]) for line in lines] == [
        (0, "failed"), (1, "failed"), (2, "stopped"), (3, "done")]
    assert calls() == ["kto seed=0", "kto seed=1", "kto seed=2", "kto seed=3"]
    for seed in (0, 1):
        Path(f"tell-seed={seed}").unlink()
    code, out, err = sweep(capsys, "resume", "out")
    assert (code, calls()) == (75, ["resume seed=0", "kto seed=1", "resume seed=2"])
    assert "1 of 4 runs stopped: seed=2. To resume: tropism resume out" in err
    Path("tell-seed=2").unlink()
    assert sweep(capsys, "resume", "out")[0] == 0
    assert calls() == ["resume seed=2"]
    code, out, _ = sweep(capsys, "resume", "out")
    assert (code, calls(), out.count(": done\n")) == (0, [], 4)


def test_ctrl_c_stops_the_run_and_then_the_sweep(base: Path, capsys: Any) -> None:
    Path("tell-seed=1").write_text("wait")

    def interrupt() -> None:
        while not Path("calls").exists() or "seed=1" not in Path("calls").read_text():
            time.sleep(0.02)
        time.sleep(0.1)  # until the script listens
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    before = signal.getsignal(signal.SIGINT)
    code, out, err = sweep(capsys, *SEEDS)
    thread.join()
    assert code == 75, out
    assert "received SIGINT. 1 of 3 runs are done. Resume the sweep with: tropism resume out" in err
    assert signal.getsignal(signal.SIGINT) is before
    assert calls() == ["kto seed=0", "kto seed=1"]
    Path("tell-seed=1").unlink()
    assert sweep(capsys, *SEEDS)[0] == 0
    assert calls() == ["resume seed=1", "kto seed=2"]


def test_a_sweep_can_grow_but_not_change(base: Path, capsys: Any, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    assert sweep(capsys, *SEEDS)[0] == 0
    calls()
    assert sweep(capsys, "sweep", "base.yaml", "--seed", "3,2,1,0", "--output", "out")[0] == 0
    assert calls() == ["kto seed=3"]
    had = "the sweep has --seed 0,1,2,3. The command can add values"
    for tokens, error in ((("--seed", "0,1"), had), (("--seed", "0,1,2,3", "--beta", "0.3"), had),
                          (("--seed", "0,1,2,3", "--beta", "0.3,0.4"), had), (("--beta", "0.3,0.4"), had)):
        assert sweep(capsys, "sweep", "base.yaml", *tokens, "--output", "out")[::2] == (
            2, f"tropism: out/sweep.yaml: {error} to them, but not leave any out. Use the same ones, or choose another "
               "directory with --output out-2\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    code, _, err = sweep(capsys, "sweep", "../base.yaml", "--seed", "0,1,2,3", "--output", "../out")
    assert (code, f"the sweep was started in {tmp_path}" in err) == (2, True)
    assert sweep(capsys, "resume", "../out")[0] == 0  # relative paths are those of the first command
    monkeypatch.chdir(tmp_path)
    base.write_text(base.read_text().replace("0.3", "0.4") + "# a comment\n")
    code, _, err = sweep(capsys, *SEEDS)
    assert (code, "beta changed since the sweep in out began. Undo the change, or choose another" in err) == (2, True)
    base.write_text(base.read_text().replace("0.4", "0.30"))
    assert sweep(capsys, "sweep", "base.yaml", "--seed", "0,1,2,3", "--output", "out")[0] == 0
    assert not calls()


@pytest.mark.parametrize(("tokens", "error"), [
    (("--seed", "0,-1"), "seed=-1: --seed: must be greater than or equal to 0"),
    (("--seed", "0,1", "--beta", "0.1,-1"), "2 of 4 combinations are invalid. The first: seed=0_beta=-1: --beta: must"),
    (("--learning-rate", "1e-6,0.000001"), "learning-rate=1e-6 and learning-rate=0.000001 are the same run"),
    (("--batch-size", "none,4"), "batch-size=none: --batch-size: must be a valid integer (got 'none')"),
    (("--loss", "kto", "--loss", "kto,foo"), "loss=kto+foo: --loss: 'foo' is not a known loss"),
    (("--eval-fraction", "0.1,0.2", "--eval-limit", "none,0"), "--eval-limit: must be greater"),
    (("--model", "/nowhere,base.yaml"), "model=nowhere-"), (("--learning-rte", "1,2"), "Did you mean --learning-rate?"),
    (("--wpo",), "`tropism dpo` has --wpo"), (("--seed", "0,1", "--max-time", "5x"), "tropism: --max-time: '5x'"),
    (("--resume", "auto", "--seed", "0,1"), "--resume: a sweep decides this for each run"),
    (("--seed", "0,1", "--output", "a", "--output", "b"), "--output names one directory"),
    (("--seed", "0,1", "--output", "."), "exists and is not empty, and has no sweep"),
    (("--seed", "0,1", "--output", "rows.jsonl"), "exists and is not a directory"),
    (("--shuffle", "maybe,false"), "shuffle=maybe: "),
])
def test_all_is_checked_before_the_first_run(base: Path, capsys: Any, tokens: tuple[str, ...], error: str) -> None:
    before = sorted(Path().iterdir())
    code, out, err = sweep(capsys, "sweep", "base.yaml", *tokens)
    assert (code, out) == (2, "")
    assert error in err
    assert sorted(Path().iterdir()) == before


def test_a_record_of_someone_else_is_data(base: Path, capsys: Any) -> None:
    assert sweep(capsys, *SEEDS)[0] == 0
    record = Path("out/sweep.yaml")
    good = record.read_text()
    for old, new, error in (
            ("values:\n  seed:", "values:\n  trust-remote-code:", "'trust-remote-code' is not an option that a sweep"),
            ("values:\n  seed:", "values:\n  output:", "is not an option that a sweep"),
            ("beta: 0.3", "trust_remote_code: true", "a file cannot allow the code of a model to run"),
            ("beta: 0.3", "foo: 1", "unknown option foo"), ("method: kto", "method: ppo", "unknown method"),
            ("values:", "valuables:", "not the record of a sweep"), ("- '0'", "- 0", "not the record of a sweep"),
            ("started_in: ", "started_in: /nowhere", "correct `started_in:`")):
        assert old in good
        record.write_text(good.replace(old, new))
        code, _, err = sweep(capsys, "resume", "out")
        assert (code, error in err) == (2, True), err
    record.write_text(good)
    assert sweep(capsys, "resume", "out", "--seed", "4")[::2] == (
        2, "tropism: --seed: a sweep keeps its options. Remove it, or start another sweep with tropism sweep CONFIG "
           "--output NEW\n")


@pytest.mark.parametrize("given", [("--evaluator", "mine:one", "--evaluator", "mine:two"),
                                   ("--evaluator=mine:one,mine:two",)])
def test_evaluators_are_named_again_whenever_a_sweep_goes_on(base: Path, capsys: Any, given: tuple[str, ...]) -> None:
    """Its record asks for them and never names them to a run, so no run trains without them unless that is said."""
    base.write_text(base.read_text() + "eval_fraction: 0.1\n")
    Path("tell-seed=1").write_text("fail")
    assert sweep(capsys, *SEEDS, *given)[0] == 1
    resume = ("resume", "out")
    for seed, command in enumerate((resume, (*SEEDS[:3], "0,1,2,3", *SEEDS[4:]), resume)):
        calls()
        code, _, err = sweep(capsys, *command)
        assert (code, calls()) == (2, [])
        assert "out/sweep.yaml: evaluator: a file cannot name code to run. If you trust it, pass --evaluator" in err
        sweep(capsys, *command, *given)
        assert calls()[0] == "resume seed=1"
        assert " --evaluator=mine:one,mine:two" in Path("out/seed=1/words").read_text(), seed
    assert " --evaluator=mine:one,mine:two" in Path("out/seed=3/words").read_text()
    assert sweep(capsys, *resume, "--evaluator", "none")[0] == 1
    assert " --evaluator=none" in Path("out/seed=1/words").read_text()


def test_torchrun_is_refused(base: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "Start it without torchrun" in sweep(capsys, *SEEDS)[2]


def test_one_sweep_at_a_time_in_a_directory(base: Path, capsys: Any) -> None:
    Path("out").mkdir()
    with owned(Path("out")):
        code, _, err = sweep(capsys, *SEEDS)
    assert (code, "out: is in use by " in err, calls()) == (2, True, [])
    assert not Path("out/sweep.yaml").exists()


def test_a_sweep_stands_for_its_runs(base: Path, capsys: Any) -> None:
    assert sweep(capsys, *SEEDS)[0] == 0
    out = Path("out")
    Path("out/report.html").write_text("")
    assert [path.name for path in runs_of([out])] == ["seed=0", "seed=1", "seed=2"]
    assert runs_of(sorted(out.iterdir())) == runs_of([out])
    assert runs_of([base, Path("nowhere")]) == [base, Path("nowhere")]


# --- the comparison ---------------------------------------------------------------------------------------------------


def report_of(path: Path, rewards: Any, *, pairs: bool = False, first: int = 0, key: str = "rewards/auc",
              final: float = 0.6) -> RunReport:
    """A run whose held-out rows begin with prompt `first`."""
    path.mkdir()
    count = len(rewards)
    parquet.write_table(pa.Table.from_pylist([{
        "id": str(row), "place": "f:1", "split": "eval", "side": ("chosen", "rejected")[row % 2] if pairs else None,
        "label": None if pairs else row % 2 == 0, "tokens": 4, "logps_before": -8.0, "logps_after": -8.0 + rewards[row],
        "reference_logps": -8.0, "reward_before": 0.0, "reward_after": float(rewards[row]),
        "prompt_key": first + row // 2, "completion_key": 100 + row + 2 * first} for row in range(count)], SCHEMA),
        path / "scores.parquet")
    record = {"step": 1, "split": "eval", key: final, f"{key}_low": final, f"{key}_high": final}
    return RunReport(path, path.name, {}, {}, {}, [record], [], [], [], [])


def test_differences_are_paired(tmp_path: Path) -> None:
    """A run that ranks as the best does has difference 0 and an interval of 0; unpaired, it would be wide."""
    generator = np.random.default_rng(0)
    scores = generator.normal(size=80) + 1.0 * (np.arange(80) % 2 == 0)
    for pairs in (False, True):
        runs = [report_of(tmp_path / f"{name}{pairs}", rewards, pairs=pairs) for name, rewards in (
            ("a", scores), ("b", 3 * scores), ("c", -scores))]
        found = held_out(runs)
        assert found is not None
        assert (found.rows, found.all_rows, found.best) == (40 if pairs else 80, True, 0)
        low, high = found.interval(0)
        assert low < found.values[0] < high
        assert found.difference(1, 0) == (0, 0, 0)
        difference = found.difference(2, 0)
        assert difference[0] == pytest.approx(1 - 2 * found.values[0])
        assert difference[2] < 0


def test_runs_are_compared_on_their_common_rows(tmp_path: Path) -> None:
    one, other = np.linspace(1, 0, 40), np.linspace(0, 1, 40)
    found = held_out([report_of(tmp_path / "a", one), report_of(tmp_path / "b", other, first=5)])
    assert found is not None
    assert (found.rows, found.all_rows) == (30, False)
    assert held_out([report_of(tmp_path / "c", one), report_of(tmp_path / "d", other, first=90)]) is None
    assert held_out([report_of(tmp_path / "e", one), report_of(tmp_path / "f", one, pairs=True)]) is None


def test_rewards_that_the_run_took_for_rounding_count_as_ties(tmp_path: Path) -> None:
    tiny = 1e-7 * np.random.default_rng(1).normal(size=40)
    found = held_out([report_of(tmp_path / "a", tiny, final=0.5)])
    assert found is not None
    assert (found.values, found.interval(0)) == ([0.5], (0.5, 0.5))
