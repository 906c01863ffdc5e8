"""`tropism inspect`: what a person is told about data, from tokenizer and config alone."""

import json
import re
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from helpers import CASES, build_tokenizer, case_yaml, expected
from tropism.cli.app import main
from tropism.commands.inspect import inspect, show
from tropism.config import InspectOptions
from tropism.data.tokenization.chat_template import NAMES, TemplateOptions
from tropism.errors import TropismError
from tropism.observe.console import Voice


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """Tokenizer and config; no weights."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model_dir, path, ignore=shutil.ignore_patterns("*.safetensors"))
    return path


@pytest.fixture
def command(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `tropism inspect`; exit code, what was said, what was complained, and the JSON."""
    def go(data: Path | list[dict[str, Any]], *options: str) -> tuple[int, str, str, dict[str, Any]]:
        if isinstance(data, list):
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in data))
            data = path
        report = tmp_path / "report.json"
        report.unlink(missing_ok=True)
        code = main(["inspect", str(data), "--model", str(model_dir), "--json", str(report), *options])
        said = capsys.readouterr()
        return code, said.out, said.err, json.loads(report.read_text()) if report.exists() else {}

    return go


def labeled(number: int, **more: Any) -> dict[str, Any]:
    return {"prompt": f"q{number}? ", "completion": f"answer {number}", "label": number % 2 == 0, **more}


def names(report: dict[str, Any], severity: str | None = None) -> set[str]:
    return {finding["name"] for finding in report["findings"] if severity in (None, finding["severity"])}


def test_case_10(command: Any) -> None:
    """D3: what was left out and why, with line numbers; and with `--strict` exit code 1."""
    code, out, err, report = command(CASES / "10-empty-completions.jsonl")
    assert code == 0, err
    assert "6 read, 1 kept: 3 empty_completion, 1 missing_field, 1 empty_prompt" in out
    assert "dropped: 10-empty-completions.jsonl:4: missing_field" in out
    assert "left_out" in names(report, "warning")
    code, out, err, report = command(CASES / "10-empty-completions.jsonl", "--strict", "--plain-text")
    assert code == 1
    assert "1 warning (--strict): left_out" in err
    assert report["rows"]["read"] == 6  # it is written all the same


def test_case_14(command: Any, model_dir: Path) -> None:
    """T1: under each template its own count of BOS and ends, in one place one after the other."""
    case = case_yaml("14-bos-eos-once.yaml")
    for name, template in case["templates"].items():
        build_tokenizer(chat_template=template).save_pretrained(model_dir)
        code, out, err, report = command([{"messages": case["messages"]}])
        assert code == 0, err
        shown, = report["shown"]
        ids = [token["id"] for part in (shown["prompt"], shown["completions"][0]["tokens"]) for token in part]
        want = expected("14")[name]
        assert ids.count(0) == want["bos_in_render"]
        own_end = name.startswith("C")
        assert ids.count(1) == (0 if own_end else 1)
        assert shown["completions"][0]["tokens"][-1] == {
            "id": 4 if own_end else 1, "text": "<|end|>" if own_end else "<|eos|>", "supervised": True}
        assert ("eos_added" in names(report)) == name.startswith("B")
        assert f'supervised text: "Seven.{"<|end|>" if own_end else "<|eos|>"}"' in out


def test_case_14_plain_row(command: Any) -> None:
    """T1: plain text has exactly one EOS, and it is learned."""
    code, out, err, _ = command([case_yaml("14-bos-eos-once.yaml")["plain_row"]], "--method", "sft")
    assert code == 0, err
    assert "[S][e][v][e][n][.][<|eos|>]" in out
    assert "P|i|c|k| |a| |p|r|i|m|e|.| |" in out


@pytest.mark.parametrize("supervise", ["last", "all"])
def test_case_15(command: Any, supervise: str) -> None:
    """M1, T2, T3: the exact text that is learned, of the last turn or of all."""
    code, out, err, report = command(CASES / "15-multiturn-assistant-mask.jsonl", "--supervise", supervise)
    assert code == 0, err
    for shown in report["shown"]:
        want = expected("15")[shown["id"]]
        completion, = shown["completions"]
        assert completion["supervised"] == (want["supervised_all_turns"] if supervise == "all"
                                            else [want["supervised_last_turn_only"]])
        ids = [token["id"] for part in (shown["prompt"], completion["tokens"]) for token in part]
        assert ids.count(3) == want["real_turns"]
        if supervise == "all":
            assert sum(token["supervised"] for token in completion["tokens"]) == want["supervised_tokens_all_turns"]
    assert "control_spelled" in names(report, "notice")
    if supervise == "all":
        assert 'supervised text: "Blue.<|end|>" ... "Two.<|end|>"' in out


def test_case_16(command: Any) -> None:
    """T4: the tools stand in the prompt as they are written."""
    code, _, err, report = command(CASES / "16-tools-null-keys.jsonl")
    assert code == 0, err
    for shown in report["shown"]:
        text = "".join(token["text"] for token in shown["prompt"])
        want = expected("16")[shown["id"]]
        assert all(word in text for word in want["must_contain"])
        assert not [word for word in want["must_not_contain"] if word in text]


def test_one_class_and_leakage(command: Any, tmp_path: Path) -> None:
    """K4: what a run would refuse is a warning here; evaluation rows that are trained on too are one."""
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text(json.dumps(labeled(0)) + "\n" + json.dumps(labeled(99)) + "\n")
    code, out, err, report = command([labeled(0), labeled(2)], "--eval-data", str(held_out))
    assert code == 0, err
    assert {"one_class", "leakage"} <= names(report, "warning")
    assert "2 desirable / 0 undesirable" in out
    assert report["eval"]["rows"]["kept"] == 2


def test_columns_of_the_records_are_seen(command: Any) -> None:
    """A source that tells the label; the record is found though it is no part of the row."""
    code, _, err, report = command([labeled(n, source="gold" if n % 2 == 0 else "bot") for n in range(40)])
    assert code == 0, err
    assert "label_from_source" in names(report, "warning")


def test_unused_columns_and_plain_text(command: Any, tmp_path: Path) -> None:
    """The lines, the warnings with their remedies, and the options; also of evaluation rows."""
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text(json.dumps(labeled(100, judge="x")) + "\n" + json.dumps(labeled(101)) + "\n")
    rows = [labeled(n, winner="a", **{"odd\x1b[31m\n": 1}) for n in range(4)]
    code, out, err, report = command(rows, "--eval-data", str(held_out), "--method", "kto")
    assert code == 0, err
    assert "\x1b" not in out
    assert "columns not used: winner, odd" in out
    assert "columns not used: judge" in out
    assert {"preference_unused", "plain_text"} <= names(report, "warning")
    assert report["columns_not_used"] == ["winner", "odd\x1b[31m\n"]
    assert report["eval"]["columns_not_used"] == ["judge"]
    code, out, err, report = command(rows, "--as-messages")
    assert code == 0, err
    assert "plain_text" not in names(report)
    assert len(report["shown"][0]["prompt"]) > len("q0? ")  # tokens of the template too
    code, _, err, _ = command(rows, "--as-messages", "--plain-text")
    assert code == 2
    assert "exclude each other" in err
    code, _, err, _ = command([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
                              "--as-messages")
    assert code == 2
    assert "--as-messages has no effect on data with messages" in err


def test_ids_beyond_the_embedding(command: Any, model_dir: Path) -> None:
    """H5: a warning with token and row; a run would stop."""
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps({**config, "vocab_size": 60}))
    code, out, err, report = command([labeled(n) for n in range(4)])
    assert code == 0, err
    assert "beyond_embedding" in names(report, "warning")
    assert re.search(r"rows.jsonl:1: token '.' has id \d+, but the model embeds only 60 tokens", out)


def test_errors_are_sentences(command: Any, tmp_path: Path) -> None:
    """H2, K3, L3: exit code 2 and one line."""
    assert command(tmp_path / "none.jsonl")[0] == 2
    code, _, err, _ = command([{**labeled(0), "label": "good"}])
    assert code == 2
    assert "rows.jsonl:1: label 'good' is not a boolean" in err
    code, _, err, _ = command([labeled(0), labeled(1)], "--system-prompt", "Be brief.")
    assert code == 2
    assert "--system-prompt has no effect on plain text" in err
    code, _, err, _ = command([labeled(0)], "--chat-template", "chatlm")
    assert code == 2
    assert "'chatlm' is neither a file nor one of chatml" in err


def test_rows_that_are_shown(command: Any) -> None:
    """One of each label and one that was cut come first; `--rows 0` shows none."""
    rows = [labeled(0), labeled(2), labeled(4), labeled(1), {**labeled(3), "completion": "long" * 50}, labeled(6)]
    code, out, err, report = command(rows, "--max-length", "50")
    assert code == 0, err
    assert [shown["place"].split(":")[1] for shown in report["shown"]] == ["1", "4", "5"]
    assert "rows.jsonl:5, undesirable (completion_cut)" in out
    assert command(rows, "--rows", "0")[3]["shown"] == []


def test_pairs_and_the_page(command: Any, tmp_path: Path) -> None:
    """A page of its own: no script, nothing from elsewhere, and markup in the data stays text."""
    page = tmp_path / "deep" / "page.html"
    code, out, err, report = command(
        [{"prompt": "<script>x</script> ", "chosen": "<b>good</b>", "rejected": "bad\x1b[31m"}], "--html", str(page))
    assert code == 0, err
    assert "chosen: 12 tokens" in out
    assert report["view"] == "paired"
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "<b>" not in text
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)
    assert text.count('class="learned"') == sum(
        token["supervised"] for side in report["shown"][0]["completions"] for token in side["tokens"])


def test_color_in_a_terminal(model_dir: Path) -> None:
    """Learned tokens are colored; without color they stand in brackets. No control character of the data passes."""
    found = inspect([labeled(0), {**labeled(1), "completion": "a\x1b[31mb"}], InspectOptions(model=str(model_dir)))
    for color in (True, False):
        console = Console(force_terminal=color, color_system="standard" if color else None, width=200,
                          soft_wrap=True, file=(out := StringIO()))
        show(found, Voice(console=console))
        assert ("[a][n][s]" in out.getvalue()) != color
        assert ("\x1b[30;42ma" in out.getvalue()) == color
        assert "\x1b[31mb" not in out.getvalue()


def test_runs_have_the_findings_too(feedback: Path, model_dir: Path) -> None:
    """`audit.json` of a run: what its rows say, refusals and leakage included."""
    from transformers import AutoConfig

    from tropism.config import KTOOptions
    from tropism.train.setup.data import prepare_data

    options = KTOOptions(model=str(model_dir), data=str(feedback), eval_data=str(feedback), output="o")
    held_out = [{**labeled(0), "completion": "I'm sorry."}, json.loads(feedback.read_text().splitlines()[0])]
    report = prepare_data(options, build_tokenizer(), [AutoConfig.from_pretrained(model_dir)], "unpaired",
                          evaluation=held_out).to_json()
    assert {"balance", "tokens", "leakage"} <= names(report)
    assert "refusals" in names(report["eval"])
    assert json.loads(json.dumps(report)) == report


def test_every_finding_and_option_is_described() -> None:
    """`docs/inspect.md` and `docs/templates.md` name what there is."""
    root = Path(__file__).parents[2]
    text = (root / "docs" / "inspect.md").read_text(encoding="utf-8")
    sources = [root / "src" / "tropism" / name for name in (
        "data/audit/findings.py", "data/audit/layout_savings.py", "data/audit/template_findings.py",
        "data/audit/unused_columns.py", "commands/inspect.py")]
    named = {name for source in sources
             for name in re.findall(r'(?m)(?:Finding\(|_about\(|^    \()\s*f?"(\w+?)(?:_?\{column\})?",',
                                    source.read_text(encoding="utf-8"))}
    assert len(named) > 15
    assert not [name for name in named if f"`{name}" not in text]
    assert not [name for name in InspectOptions.model_fields if f"`{name}`" not in text]
    described = (root / "docs" / "templates.md").read_text(encoding="utf-8")
    assert not [name for name in (*TemplateOptions.model_fields, *NAMES) if f"`{name}`" not in described]


def test_a_generator_is_gone_through_once(model_dir: Path) -> None:
    """Rows given in Python; `check` is what `--strict` asks."""
    found = inspect((labeled(n) for n in range(50)), InspectOptions(model=str(model_dir), rows=1, plain_text=True))
    assert found.audit.read == 50
    assert len(found.shown) == 1
    found.check()
    with pytest.raises(TropismError, match="one_class"):
        inspect([labeled(0)], InspectOptions(model=str(model_dir))).check()


@pytest.mark.parametrize(("rows", "options"), [
    ([labeled(0), labeled(1)], []),
    ([{"prompt": "p ", "chosen": "good", "rejected": "bad"}], []),
    ([labeled(0), {**labeled(1), "completion": "long" * 50}], ["--max-length", "50"]),
], ids=["labeled", "pairs", "truncated"])
def test_the_shape_of_the_file(command: Any, rows: list[dict[str, Any]], options: list[str]) -> None:
    """Rows hold exactly these keys, and a token's text joins to what is learned."""
    code, _, err, report = command(rows, *options)
    assert code == 0, err
    assert len(report["shown"]) == len(rows)
    for shown in report["shown"]:
        assert set(shown) == {"id", "place", "label", "notes", "prompt", "completions"}
        assert shown["prompt"]
        assert all(set(token) == {"id", "text"} for token in shown["prompt"])
        assert len(shown["completions"]) == (2 if report["view"] == "paired" else 1)
        for side in shown["completions"]:
            assert set(side) == {"supervised", "tokens"}
            assert all(set(token) == {"id", "text", "supervised"} for token in side["tokens"])
            learned = "".join(token["text"] for token in side["tokens"] if token["supervised"])
            assert "".join(side["supervised"]) == learned
