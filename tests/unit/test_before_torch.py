"""Wrong paths and options are reported, and the first line is printed, before torch is imported."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
import contextlib, io, json, sys


class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ImportError("TORCH")


sys.meta_path.insert(0, NoTorch())
from tropism.cli.app import main

found = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except ImportError as error:
            code = str(error)
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""

RUN = ["--model", "model", "--data", "data.jsonl"]
TRAIN = [*RUN, "--output", "new"]

WRONG: list[tuple[str, list[str], str]] = [
    ("data", ["kto", "--model", "model", "--data", "none.jsonl", "--output", "new"], "none.jsonl: file not found"),
    ("one of several files", ["sft", "--model", "model", "--data", "data.jsonl:2,none.csv", "--output", "new"],
     "none.csv: file not found"),
    ("kind of data", ["sft", "--model", "model", "--data", "notes.txt", "--output", "new"], "unsupported file type"),
    ("weight of data", ["sft", "--model", "model", "--data", "data.jsonl:0", "--output", "new"], "weight of 0"),
    ("model", ["dpo", "--model", "./none", "--data", "data.jsonl", "--output", "new"], "./none: directory not found"),
    ("GGUF file", ["dpo", "--model", "none.gguf", "--data", "data.jsonl", "--output", "new"], "GGUF file not found"),
    ("run as model", ["dpo", "--model", "run", "--data", "data.jsonl", "--output", "new"], "is a run directory"),
    ("no model", ["dpo", "--model", "empty", "--data", "data.jsonl", "--output", "new"], "config.json not found"),
    ("eval data", ["kto", *TRAIN, "--eval-data", "held/none.jsonl"], "none.jsonl: file not found"),
    ("both held out", ["kto", *TRAIN, "--eval-data", "data.jsonl", "--eval-fraction", "0.1"], "exclude each other"),
    ("used output", ["kto", *RUN, "--output", "model"], "model exists and is not empty"),
    ("output of a run", ["kto", *RUN, "--output", "run"], "tropism resume run"),
    ("output is a file", ["kto", *RUN, "--output", "data.jsonl"], "not a directory"),
    ("output below a file", ["kto", *RUN, "--output", "data.jsonl/run"], "Not a directory"),
    ("template", ["kto", *TRAIN, "--chat-template", "none.jinja"], "neither a file nor one of"),
    ("template with an error", ["kto", *TRAIN, "--chat-template", "bad.jinja"], "not a valid template"),
    ("chat", ["chat", "./none"], "./none: directory not found"),
    ("chat with another", ["chat", "model", "--compare", "none.gguf"], "GGUF file not found"),
    ("blind", ["chat", "model", "--blind"], "--blind has no effect without --compare"),
    ("top p", ["chat", "model", "--top-p", "0.9"], "--top-p has no effect at temperature 0"),
    ("temperature", ["chat", "model", "--temperature", "0.001"], "too low"),
    ("feedback", ["chat", "model", "--feedback", "f.json"], "ends in .jsonl"),
    ("feedback in a file", ["chat", "model", "--feedback", "data.jsonl/f.jsonl"], "data.jsonl/f.jsonl: cannot be "),
    ("other rows", ["chat", "model", "--compare", "run", "--feedback", "data.jsonl"], "data.jsonl:1: the file"),
    ("reference", ["dpo", *TRAIN, "--reference", "/none"], "/none: directory not found"),
    ("teacher", ["kd", *TRAIN, "--teacher", "~/none/x"], "directory not found"),
    ("adapter", ["dpo", *TRAIN, "--lora.adapter", "none"], "--lora.adapter none: directory not found"),
    ("no adapter", ["dpo", *TRAIN, "--lora.adapter", "empty"], "adapter_config.json not found"),
    ("resume another run", ["kto", *TRAIN, "--resume", "run"], "--resume run is neither new"),
    ("resume nothing", ["kto", *TRAIN, "--resume", "new"], "no run to resume"),
    ("tracker", ["kto", *TRAIN, "--track", "wanbd"], "unknown tracker 'wanbd'"),
    ("loss", ["dpo", *TRAIN, "--loss", "sigmiod"], "Did you mean sigmoid?"),
    ("option of another loss", ["dpo", *TRAIN, "--simpo-gamma", "1"], "--simpo-gamma has no effect"),
    ("number", ["kto", *TRAIN, "--beta", "-1"], "--beta: must be greater than 0"),
    ("option", ["kto", *TRAIN, "--bata", "1"], "Did you mean --beta?"),
    ("config", ["train", "none.yaml"], "none.yaml: cannot be read"),
    ("key of a config", ["train", "bad.yaml"], "bad.yaml:2: unknown option"),
    ("data of a config", ["train", "good.yaml"], "none.jsonl: file not found"),
    ("resume no run", ["resume", "empty"], "empty has no config.yaml"),
    ("resume, data is gone", ["resume", "run"], "gone.jsonl: file not found"),
    ("evaluate", ["evaluate", "./none", "--data", "data.jsonl"], "./none: directory not found"),
    ("evaluate data", ["evaluate", "model", "--data", "none.jsonl"], "none.jsonl: file not found"),
    ("evaluate reference", ["evaluate", "model", "--data", "data.jsonl", "--reference", "./none"], "./none"),
    ("evaluate json", ["evaluate", "model", "--data", "data.jsonl", "--json", "data.jsonl/x"], "Not a directory"),
    ("score", ["score", "model", "--data", "data.jsonl", "--output", "x.txt"], ".jsonl or .parquet"),
    ("score twice", ["score", "model", "--data", "data.jsonl", "--output", "data.jsonl"], "already exists"),
    ("score model", ["score", "./none", "--data", "data.jsonl", "--output", "x.jsonl"], "./none"),
    ("inspect", ["inspect", "none.jsonl", "--model", "model"], "none.jsonl: file not found"),
    ("inspect model", ["inspect", "data.jsonl", "--model", "./none"], "./none: directory not found"),
    ("convert", ["convert", "none.jsonl", "--to", "single", "--output", "x.jsonl"], "none.jsonl: file not found"),
    ("export", ["export", "none", "--to", "new"], "none: not a run directory"),
    ("export a checkpoint", ["export", "run/checkpoints/step-00000001", "--to", "new"],
     "use `tropism export run --checkpoint step-00000001`"),
    ("export into the run", ["export", "run", "--to", "run/model/x"], "belongs to the run"),
    ("export target", ["export", "run", "--to", "model"], "model exists and is not empty"),
    ("export base", ["export", "run", "--to", "new", "--base", "./none"], "./none"),
    ("export size", ["export", "run", "--to", "new", "--max-shard-size", "5XB"], "5XB: not a valid size"),
    ("resume a checkpoint", ["resume", "run/checkpoints/step-00000009"], "cannot resume"),
    ("verify", ["verify", "empty"], "empty: not a run directory"),
    ("demo output", ["demo", "--output", "model"], "model exists and is not empty"),
]

STARTED: dict[str, tuple[list[str], str]] = {
    "kto": (["kto", *TRAIN], "kto: model model, data data.jsonl, output new\n"),
    "kd": (["kd", *TRAIN, "--teacher", "owner/name"],
           "kd: model model, teacher owner/name, data data.jsonl, output new\n"),
    "hub": (["sft", "--model", "owner/name", "--data", "owner/rows", "--output", "deep/new"],
            "sft: model owner/name, data owner/rows, output deep/new\n"),
    "evaluate": (["evaluate", "run", "--data", "data.jsonl"], "evaluate: model run, data data.jsonl\n"),
    "score": (["score", "model", "--data", "data.jsonl", "--output", "s.jsonl"],
              "score: model model, data data.jsonl, output s.jsonl\n"),
    "verify": (["verify", "run"], "verify: run run\n"),
    "export": (["export", "run", "--to", "new"], "export: run run, to new\n"),
}

Answer = tuple[int | str, str, str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an input of each kind."""
    path = tmp_path_factory.mktemp("place")
    for name in ("model", "empty", "run/model", "run/checkpoints/step-00000001"):
        (path / name).mkdir(parents=True)
    (path / "run" / "checkpoints" / "step-00000001" / "COMPLETE").touch()
    for name in ("model", "run/model"):
        (path / name / "config.json").write_text("{}")
    (path / "run" / "manifest.json").write_text("{}")
    options = "model: model\noutput: new\n"
    (path / "run" / "config.yaml").write_text(f"method: sft\n{options}data: gone.jsonl\nparallel:\n  tensor: 1\n")
    (path / "good.yaml").write_text(f"method: kto\n{options}data: none.jsonl\n")
    (path / "bad.yaml").write_text("method: kto\nbata: 1\n")
    (path / "data.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    (path / "notes.txt").write_text("a\n")
    (path / "bad.jinja").write_text("{% for %}")
    return path


@pytest.fixture(scope="module")
def answers(place: Path) -> Callable[[list[str]], Answer]:
    """Exit code, output and errors of each command. All run in one process, which cannot import torch."""
    commands = [arguments for _, arguments, _ in WRONG] + [arguments for arguments, _ in STARTED.values()]
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=json.dumps(commands), capture_output=True, text=True,
                          cwd=place, env={**os.environ, "HOME": str(place)}, check=True)
    found = dict(zip(map(tuple, commands), json.loads(done.stdout), strict=True))
    return lambda arguments: tuple(found[tuple(arguments)])  # type: ignore[return-value]


@pytest.mark.parametrize(("what", "arguments", "said"), WRONG, ids=[what for what, _, _ in WRONG])
def test_what_is_wrong_is_said_first(answers: Callable[[list[str]], Answer], what: str, arguments: list[str],
                                     said: str) -> None:
    """H2: with the place; nothing else is printed."""
    code, out, err = answers(arguments)
    assert code in (1, 2), (what, code)
    assert said in err
    assert err.startswith("tropism: ")
    assert not out


@pytest.mark.parametrize("name", STARTED)
def test_the_first_line_does_not_wait(answers: Callable[[list[str]], Answer], name: str) -> None:
    """H1: what a command is about to read and write; torch comes after it."""
    arguments, line = STARTED[name]
    code, out, err = answers(arguments)
    assert code == "TORCH"
    assert out.startswith("tropism ")
    assert out.endswith(line)
    assert not err


def test_nothing_was_created(answers: Callable[[list[str]], Answer], place: Path) -> None:
    assert not {"new", "deep", "held"} & {path.name for path in place.iterdir()}


def test_a_wrong_path_costs_less_than_a_second(place: Path) -> None:
    """With some room for a slow machine; torch alone would take more."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-m", "tropism", "kto", "--model", "model", "--data", "none.jsonl",
                           "--output", "new"], cwd=place, capture_output=True, check=False)
    assert done.returncode == 2
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1.5


def test_an_output_keeps_standard_output_for_itself(place: Path, tmp_path: Path) -> None:
    """`--json /dev/stdout`: the first line, and the note about a name that may be on the Hub, go to standard error."""
    done = subprocess.run([sys.executable, "-c", PROGRAM.replace("redirect_stdout(out)", "nullcontext()").replace(
        "redirect_stderr(err)", "nullcontext()").replace("print(json", "0 and print(json")],
        input=json.dumps([["evaluate", "model", "--data", "data.jsonl", "--json", "/dev/stdout"]]),
        capture_output=True, text=True, cwd=place, check=True)
    assert done.stdout == ""
    assert "evaluate: model model" in done.stderr
