"""G3: text of data, templates, stores and run directories on its way through commands."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from hostile import PAYLOADS, is_harmless
from integration.looking import Bench, bench

__all__ = ["bench"]
CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def shown(bench: Bench, *tokens: Any, code: int = 0) -> str:
    """What a command prints, all of it harmless."""
    assert bench.call(*tokens) == code, bench.err
    assert is_harmless(bench.out + bench.err)
    return bench.out + bench.err


def test_ids_columns_roles_and_labels(bench: Bench) -> None:
    """In findings, samples, errors and the table of a conversion."""
    for number, payload in enumerate(PAYLOADS):
        text = payload.encode(errors="replace").decode()  # half a character in a prompt is refused
        rows = [{"id": payload, "prompt": f"{text} ", "completion": f"b{text}", "label": label,
                 f"x{payload}": payload} for label in (True, False, False)]
        file = bench.file(rows, f"{number}.jsonl")
        out = bench.path / f"{number}"
        shown(bench, "convert", file, "--to", "unpaired", "--output", f"{out}-1.jsonl", "--keep-columns",
              "--json", f"{out}.json")
        assert is_harmless(Path(f"{out}.json").read_text(encoding="utf-8"))
        if number % 8 == 0:  # each reads the tokenizer
            shown(bench, "inspect", file, "--model", bench.model, "--json", f"{out}.json", "--html", f"{out}.html",
                  "--store", bench.path / "store")
            assert is_harmless(Path(f"{out}.json").read_text(encoding="utf-8"))
            assert is_harmless(Path(f"{out}.html").read_text(encoding="utf-8"))
        for wrong in ({"label": payload or "x"}, {"completion": 5}, {"prompt": {payload: 1}}):
            file = bench.file([{**rows[0], **wrong}], "wrong.jsonl")
            said = shown(bench, "convert", file, "--to", "unpaired", "--output", f"{out}-2.jsonl", code=2)
            assert said.startswith("tropism: wrong.jsonl:1: ")
            assert said.count("\n") == 1


def test_a_run_of_rows_with_odd_ids(bench: Bench) -> None:
    """From the first line to the last, and in what verify and export say of it."""
    rows = [{"id": r"\[/x]", "prompt": f"[bold]{number} ", "completion": "\x1b[31m", "label": number % 2 == 0}
            for number in range(4)]
    folder = bench.path / "a\x1b]0;t\x07\nb"
    folder.mkdir()
    file = Path(shutil.move(bench.file([*rows, {**rows[0], "completion": ""}]), folder / "[r].jsonl"))
    run = folder / "[/run] :x:"
    run.parent.mkdir()
    said = shown(bench, "kto", "--model", bench.model, "--data", file, "--output", run, "--max-steps", 1, "--store",
                 folder / "s", "--samples", 1, "--eval-fraction", "0.3")
    assert r"a\x1b]0;t\x07\nb/[/run] :x:/model" in said
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "python": "\x1b[31m3", "libraries": {
        **manifest["libraries"], "torch": "[/x]\x1b]52;c;\x07\x9b"}}))
    shown(bench, "verify", run, "--json", bench.path / "v.json", code=1)
    shown(bench, "export", run, "--to", folder / "e")
    (meta,) = (folder / "s").glob("*/meta.json")
    meta.write_text(json.dumps({"model": "m\x1b[2J\nstore: empty", "precision": "[/x]", "layout": "\x9b"}))
    assert r"m\x1b[2J\nstore: empty ([/x], \x9b)" in shown(bench, "store", "list", "--store", folder / "s")


def test_what_a_template_says(bench: Bench) -> None:
    """A template's own message, and its errors."""
    file = bench.file([{"messages": CHAT}])
    for text in ("{{ raise_exception('no \x1b]52;c;eA==\x07 [/x]\nfake: line') }}", "{% \x1b[31m %}",
                 "{{ x['\x9b'].y.z }}"):
        template = bench.path / "t.jinja"
        template.write_text(text, encoding="utf-8")
        said = shown(bench, "inspect", file, "--model", bench.model, "--chat-template", template, code=2)
        assert said.count("\n") == 1


def test_a_console_without_unicode(bench: Bench) -> None:
    """Names that the encoding lacks are written as escapes."""
    name = "\u65e5\u672c\u00fc"
    file = bench.file([{"id": name, "prompt": f"{name} ", "completion": f"b{number}", "label": number % 2 == 0}
                       for number in range(4)], f"{name}.jsonl")
    done = subprocess.run(
        [sys.executable, "-m", "tropism", "convert", str(file), "--to", "unpaired", "--output",
         f"{bench.path}/{name}.csv"], capture_output=True, check=False,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert rb"\u65e5\u672c\xfc.jsonl: 4 read" in done.stdout
