"""The page about runs: it shows the records as they are, and nothing that runs or leaves the page."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

pytest.importorskip("matplotlib")

from tropism.cli.app import main
from tropism.errors import DataError
from tropism.report import report, report_on, write_figures, write_page
from tropism.report.charts import charts_of
from tropism.report.compare import pair_accuracies
from tropism.report.draw import thinned

HOSTILE = ("</script><script>alert(1)</script></svg>{{ 7 * 7 }}{% raw %}<img src=x onerror=alert(1)>&amp;\x1b[31m"
           "\u202e$x$")


def make_run(path: Path, *, steps: int = 12, text: str = "a text", pairs: bool = False, status: str = "done",
             rows: int = 30, option: Any = 0.1, seed: int = 0) -> Path:
    """A run directory as training leaves it, with `text` in every field that comes from others."""
    path.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    key = "rewards/accuracies" if pairs else "rewards/auc"
    records: list[dict[str, Any]] = []
    for step in range(steps + 1):
        if step:
            noise = generator.normal(size=4)
            records.append({
                "step": step, "split": "train", "loss": 0.5 + 0.1 * noise[0], "rewards/chosen": noise[1],
                "rewards/rejected": noise[2], "rewards/margins": noise[1] - noise[2], "kl": max(noise[3], 0.0),
                "kl/raw": noise[3], "kl/stderr": 0.1, "grad_norm": None if step == 3 else 1 + abs(noise[0]),
                "learning_rate": 1e-5 / step, "tokens_per_second": 1000 + noise[1]})
        if step in (0, steps):
            low, high = (0.5, 0.5) if step == 0 else (0.6, 0.8)
            records.append({"step": step, "split": "eval", "loss": 0.5 - 0.1 * (step > 0), key: (low + high) / 2,
                            f"{key}_low": low, f"{key}_high": high, "rewards/margins": 0.3, "baselines/logps": 0.4,
                            "baselines/length": 0.55})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    done = {"steps": steps, "planned_steps": steps, "seconds": 3.0, "verdict": {"word": "learned", "why": text}}
    manifest = {"schema_version": 1, "method": "dpo" if pairs else "kto", "model": text, "status": status,
                "started": "2026-01-01T00:00:00+00:00", "device": "cpu", "precision": "fp32", "python": "3.11",
                "libraries": {"torch": text}, "held_out_prompts": rows, "fingerprints": {}, "seed": 0,
                **(done if status == "done" else {"error": text})}
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "config.yaml").write_text(f"method: kto\nbeta: {option}\nsystem: {json.dumps(text)}\n")
    (path / "audit.json").write_text(json.dumps({"source": text, "findings": [{"severity": text, "text": text}]}))
    (path / "samples.jsonl").write_text(json.dumps(
        {"id": text, "held_out": True, "prompt": text, "before": text, "after": text}) + "\n")
    (path / "notices.jsonl").write_text(json.dumps({"step": 3, "guard": text, "text": text}) + "\n")
    (path / "moved.jsonl").write_text(json.dumps({"id": text, "place": text, "label": text, "change": 1.5,
                                                  "prompt": text, "completion": text}) + "\n")
    good = np.arange(rows * 2) % 2 == 0
    before, after = np.zeros(rows * 2), generator.normal(size=rows * 2) + good
    parquet.write_table(pa.table({
        "id": [text] * rows * 2, "place": [text] * rows * 2, "split": ["eval"] * rows * 2,
        "side": [("chosen", "rejected")[number % 2] if pairs else None for number in range(rows * 2)],
        "label": pa.array([None if pairs else bool(one) for one in good], pa.bool_()),
        "tokens": generator.integers(1, 50, rows * 2), "logps_before": before - 5, "logps_after": after - 5,
        "reward_before": before, "reward_after": after,
        "prompt_key": pa.array([number // 2 for number in range(rows * 2)], pa.uint64()),
        "completion_key": pa.array(range(rows * 2), pa.uint64())}), path / "scores.parquet")
    return path


class Elements(HTMLParser):
    """Elements of a page with their attributes, and the text in each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A KTO and a DPO run on the same held-out pairs, with hostile text."""
    base = tmp_path_factory.mktemp("runs") / "a<b>&'\"$x$"
    return [make_run(base / "kto", text=HOSTILE), make_run(base / "dpo", text=HOSTILE, pairs=True, option=0.5, seed=1)]


@pytest.fixture(scope="module", params=[1, 2])
def page(request: pytest.FixtureRequest, runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("pages") / "page.html"
    write_page(report(runs[:request.param]), path)
    return path.read_text(encoding="utf-8")


def test_nothing_in_a_run_is_markup_or_code(page: str) -> None:
    found = Elements(page)
    names = [tag for tag, _ in found.found]
    assert names.count("script") == 1
    assert ("script", {"type": "application/json", "id": "figures-data"}) in found.found
    assert "img" not in names
    assert not [name for _, attributes in found.found for name in attributes if name.startswith("on")]
    assert names.count("svg") == page.count("</svg>")
    assert "{{ 7 * 7 }}" in page
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "default-src 'none'" in page


def test_nothing_outside_of_the_page_is_referred_to(page: str) -> None:
    for tag, attributes in Elements(page).found:
        for name in ("src", "href", "action", "data", "srcset"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, name)
        assert "url(" not in re.sub(r"url\(#[^)]*\)", "", attributes.get("style") or "")
    assert not re.search(r"@import|https?://", page)
    ids = [attributes["id"] for _, attributes in Elements(page).found if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = set(re.findall(r"(?:href=\"|url\()#([^\")]*)", page))
    assert targets <= set(ids)


def test_figures_hold_the_records(page: str, runs: list[Path]) -> None:
    data = json.loads(Elements(page).scripts[0])
    several = "2 runs" in page
    figures = {figure["name"]: figure for figure in data["figures"]}
    records = [json.loads(line) for line in (runs[0] / "metrics.jsonl").read_text().splitlines()]
    wanted = {"loss": ("loss", "train"), "grad_norm": ("grad_norm", "train"),
              "learning_rate": ("learning_rate", "train"),
              "speed": ("tokens_per_second", "train"), "kl": ("kl", "train"), "ranking": ("rewards/auc", "eval")}
    for name, (key, split) in wanted.items():
        expected = [(record["step"], record[key]) for record in records
                    if record["split"] == split and record.get(key) is not None]
        line = figures[name]["lines"][0]
        assert data["x"][line["x"]] == [step for step, _ in expected]
        assert line["y"] == pytest.approx([value for _, value in expected], rel=1e-6)
    band = figures["ranking"]["bands"][0]
    assert (band["low"], band["high"]) == ([0.5, 0.6], [0.5, 0.8])
    assert ("baseline length" in figures["ranking"]["levels"]) is not several
    histogram = figures["histogram-kto" if several else "histogram"]["lines"]
    assert sum(histogram[0]["y"]) == 60


def test_each_figure_has_words(page: str) -> None:
    figures = [attributes for tag, attributes in Elements(page).found if tag == "figure"]
    assert len(figures) >= 8
    assert all(one["role"] == "img" and len(one["aria-label"] or "") > 20 for one in figures)


def test_a_common_metric_of_kto_and_dpo(runs: list[Path]) -> None:
    """Of KTO's rows the pairs are those that DPO has; the differences are paired."""
    read = report(runs).runs
    count, found = pair_accuracies(read)
    assert count == 30
    for run, one in zip(read, found, strict=True):
        rewards = np.array(run.scores["reward_after"])
        assert one.value == pytest.approx((rewards[::2] > rewards[1::2]).mean())
        assert one.low <= one.value <= one.high
    assert found[0].difference is None
    assert found[1].difference[0] == pytest.approx(found[1].value - found[0].value)  # type: ignore[index]
    same = pair_accuracies([read[0], read[0]])[1]
    assert same[1].difference == (0.0, 0.0, 0.0)


def test_ten_thousand_steps_fit(tmp_path: Path) -> None:
    run = make_run(tmp_path / "long", steps=10_000)
    report_path = tmp_path / "page.html"
    write_page(report([run]), report_path)
    assert report_path.stat().st_size < 2_000_000


def test_thinning_keeps_every_extreme() -> None:
    x, y = np.arange(50_000.0), np.random.default_rng(0).normal(size=50_000)
    short_x, short_y = thinned(x, y)
    assert short_x.size <= 1210
    assert (short_y.min(), short_y.max()) == (y.min(), y.max())
    assert (short_x[0], short_x[-1]) == (0.0, 49_999.0)


def test_a_run_that_is_not_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its verdict is that of its evaluations so far, with the rule of a finished run."""
    run = make_run(tmp_path / "run", status="running")
    with (run / "metrics.jsonl").open("a") as opened:
        opened.write('{"step": 13, "spl')  # being written
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    assert "verdict: learned: the reward AUC is 0.700 (95%: 0.600 to 0.800)" in out
    assert (run / "report.html").is_file()


def test_a_run_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "manifest.json").write_text(json.dumps({"status": "running", "method": "kto", "fingerprints": {}}))
    assert main(["report", str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert "no verdict yet" in capsys.readouterr().out
    assert "There are no records yet" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(("file", "content", "says"), [
    ("samples.jsonl", '{"prompt": 3}\n', "samples.jsonl:1"), ("moved.jsonl", "[]\n", "moved.jsonl:1"),
    ("metrics.jsonl", '{"step": 1, "split": "train", "loss": "x"}\n', "metrics.jsonl:1"),
    ("scores.parquet", "PAR1", "scores.parquet"), ("audit.json", "[", "audit.json"),
    ("manifest.json", '{"status": "stopped", "held_out_prompts": "x"}', "held_out_prompts"),
    ("config.yaml", "a: [", "config.yaml"), ("notices.jsonl", '{"step": 1}\n', "notices.jsonl:1")])
def test_a_damaged_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, content: str,
                                 says: str) -> None:
    run = make_run(tmp_path / "run")
    (run / file).write_text(content)
    assert main(["report", str(run)]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert "Traceback" not in err
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(("column", "value"), [
    ("reward_after", "x"), ("reward_before", "x"), ("logps_after", "x"), ("tokens", "x"), ("tokens", None),
    ("prompt_key", 1.5), ("prompt_key", None), ("completion_key", -1), ("label", "perhaps"), ("side", "chosen")])
def test_damaged_scores_are_named(tmp_path: Path, column: str, value: Any) -> None:
    run = make_run(tmp_path / "run", rows=2)
    table = parquet.read_table(run / "scores.parquet")
    place = table.column_names.index(column)
    parquet.write_table(table.set_column(place, column, pa.array([value] * len(table))), run / "scores.parquet")
    with pytest.raises(DataError, match=re.escape(str(run / "scores.parquet"))):
        report([run])


@pytest.mark.parametrize("arguments", [["NOTHING"], ["RUN", "RUN"], ["RUN", "--html", "HERE"]])
def test_wrong_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    run = make_run(tmp_path / "RUN")
    names = {"RUN": str(run), "NOTHING": str(tmp_path / "nothing"), "HERE": str(tmp_path)}
    assert main(["report", *(names.get(one, one) for one in arguments)]) in (1, 2)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [
    *(["--html", name] for name in ("metrics.jsonl", "manifest.json", "config.yaml", "scores.parquet", "moved.jsonl",
                                    "audit.json", "logs/events.html")), ["--figures", "metrics.jsonl"]])
def test_no_file_of_a_run_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                      arguments: list[str]) -> None:
    """Nor one of the second run, whose name holds a comma."""
    runs = [make_run(tmp_path / name, rows=2) for name in ("one", "a,b")]
    (runs[1] / "logs").mkdir()
    (runs[1] / "logs" / "events.html").touch()
    before = {file: file.read_bytes() for run in runs for file in run.rglob("*") if file.is_file()}
    assert main(["report", *map(str, runs), arguments[0], str(runs[1] / arguments[1])]) == 2
    err = capsys.readouterr().err
    assert arguments[1] in err
    assert "Traceback" not in err
    assert {file: file.read_bytes() for run in runs for file in run.rglob("*") if file.is_file()} == before


def test_a_page_goes_into_a_stream_and_through_a_link(tmp_path: Path) -> None:
    """Neither is replaced by a file: a run as root would lose `/dev/stdout`."""
    run = make_run(tmp_path / "run", rows=2)
    (tmp_path / "link.html").symlink_to(tmp_path / "target.html")
    with (tmp_path / "opened.html").open("wb") as opened:
        (tmp_path / "stream").symlink_to(f"/proc/self/fd/{opened.fileno()}")
        for name in ("link.html", "stream", f"/dev/fd/{opened.fileno()}"):
            assert main(["report", str(run), "--html", str(tmp_path / name)]) == 0
    assert all((tmp_path / name).is_symlink() for name in ("link.html", "stream"))
    assert (tmp_path / "target.html").read_text().rstrip().endswith("</html>")
    assert (tmp_path / "opened.html").read_text().count("</html>") == 2


def test_figures_are_written_as_files(tmp_path: Path, runs: list[Path]) -> None:
    found = report(runs)
    paths = write_figures(found, tmp_path / "figures")
    assert len(paths) == len(charts_of(found.runs))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that cannot be written is a note, and the environment can turn all of them off."""
    said: list[str] = []

    class Quiet:
        def say(self, text: str) -> None:
            said.append(text)

        warn = say

    run = make_run(tmp_path / "run")
    report_on(run, Quiet())  # type: ignore[arg-type]
    assert not said
    monkeypatch.delenv("TROPISM_NO_REPORT")
    kept = (run / "samples.jsonl").read_text()
    (run / "samples.jsonl").write_text("[]\n")
    report_on(run, Quiet())  # type: ignore[arg-type]
    assert "samples.jsonl:1" in said[0]
    (run / "samples.jsonl").write_text(kept)
    monkeypatch.setattr("tropism.report.draw.to_svg", lambda *arguments: 1 / 0)
    report_on(run, Quiet())  # type: ignore[arg-type]
    assert said[1] == "division by zero. The run is complete without its report."
    assert not (run / "report.html").exists()


def test_a_sweep_is_reported_as_its_runs(tmp_path: Path) -> None:
    """By its directory, or by all that is in it."""
    for seed in (0, 1):
        make_run(tmp_path / "out" / f"seed={seed}", seed=seed)
    for name in ("sweep.yaml", "sweep.jsonl"):
        (tmp_path / "out" / name).write_text("")
    assert main(["report", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(f"seed={seed}" in page for seed in (0, 1))
    assert main(["report", *map(str, sorted((tmp_path / "out").iterdir())), "--html", str(tmp_path / "all.html")]) == 0
    assert (tmp_path / "all.html").read_text() == page
