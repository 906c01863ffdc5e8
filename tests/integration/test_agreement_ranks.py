"""Two processes of gloo that differ in something: both name it, before the first step, and neither waits."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from processes import free_port, run_ranks, start_fork_server
from tropism.cli.app import main

LIMIT_S = 20
SETTINGS = {"batch_size": 8, "max_steps": 2, "samples": 0, "learning_rate": 1e-3}

Job = tuple[str, str, list[dict[str, Any]]]
"""What must be named, the method, and the options of each process; `given` names what a caller in Python passes."""


def copied(model: Path, folder: Path, name: str, change: Callable[[Path], None]) -> str:
    path = Path(shutil.copytree(model, folder / name))
    change(path)
    return str(path)


def other_weights(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    next(iter(weights.values())).view(-1)[-1] += 1e-3
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def other_template(path: Path) -> None:
    file = path / "chat_template.jinja"
    file.write_text(file.read_text() + " ")


def other_tokenizer(path: Path) -> None:
    file = path / "tokenizer.json"
    found = json.loads(file.read_text())
    vocabulary = found["model"]["vocab"]
    vocabulary["o"], vocabulary["e"] = vocabulary["e"], vocabulary["o"]
    file.write_text(json.dumps(found))


def jobs_of(model: Path, feedback: Path, folder: Path) -> list[Job]:
    lines = feedback.read_text().splitlines(keepends=True)
    for name, content in (("order", lines[::-1]), ("fewer", lines[:-1])):
        (folder / f"{name}.jsonl").write_text("".join(content))
    weights = copied(model, folder, "weights", other_weights)
    common = {"model": str(model), "data": str(feedback), "store": str(folder / "store"),
              "output": str(folder / "run"), **SETTINGS}

    def two(named: str, one: dict[str, Any], other: dict[str, Any], method: str = "kto") -> Job:
        return named, method, [common | one, common | other]

    return [
        two("--model: model.safetensors", {}, {"model": weights}),
        two("--model: tokenizer.json", {}, {"model": copied(model, folder, "tokenizer", other_tokenizer)}),
        two("--model: chat_template.jinja", {}, {"model": copied(model, folder, "template", other_template)}),
        two("--beta", {}, {"beta": 0.2}),
        two("--seed", {}, {"seed": 1}),
        two("--max-steps", {}, {"max_steps": 3}),
        two("--microbatch-tokens", {}, {"microbatch_tokens": 64}),
        two("--data", {}, {"data": str(folder / "fewer.jsonl")}),
        two("--data: order of the rows", {}, {"data": str(folder / "order.jsonl")}),
        two("--precision", {}, {"precision": "fp64"}),
        two("version of peft", {}, {"given": "version"}),
        two("code of tropism", {}, {"given": "code"}),
        two("--lora.rank", {"lora": {"rank": 2}}, {"lora": {"rank": 4}}),
        two("--reference: model.safetensors", {"reference": str(model)}, {"reference": weights}),
        two("--teacher: model.safetensors", {"teacher": str(model)}, {"teacher": weights}, "kd"),
        two("--parallel.shard", {"parallel": {"shard": 1}}, {}),
        two("--resume", {}, {"resume": "auto"}),
        two("--model", {}, {"given": "model"}),
        two("model: model.embed_tokens.weight", {"given": "model"}, {"given": "other model"}),
        two("reference: model.embed_tokens.weight", {"given": "reference"}, {"given": "other reference"}),
        two("optimizer: lr", {"given": "optimizer"}, {"given": "other optimizer"}),
        two("--model: rms_norm_eps of its config", {"given": "config"}, {"given": "other config"}),
        two("--data", {"given": "rows"}, {"given": "other rows"}),
        two("call", {"given": "fit"}, {"given": "evaluate"}),
        two("--resume", {"given": "fit"}, {"given": "resume"})]


def attempt(method: str, settings: dict[str, Any]) -> None:
    """A run as a caller in Python starts it; `given` is what it passes, or what its process differs in."""
    import tropism
    from tropism.config import METHODS
    from tropism.runner import run

    given = settings.pop("given", None)
    known = importlib.metadata.version
    if given in (None, "version", "code"):
        version = patch.object(importlib.metadata, "version",
                               lambda name: "1.2.3" if (given, name) == ("version", "peft") else known(name))
        code = patch("tropism.observe.manifest.code_hash", lambda: str(given == "code"))
        with version, code:
            run(METHODS[method](**settings))
        return
    from transformers import AutoModelForCausalLM, AutoTokenizer

    other = given.startswith("other ")

    def module() -> Any:
        made = AutoModelForCausalLM.from_pretrained(settings["model"])
        made.get_input_embeddings().weight.data[3] += float(other)
        return made

    what = given.removeprefix("other ")
    objects: dict[str, Any] = {"model": settings.pop("model"), "train_dataset": settings.pop("data"), "quiet": True}
    settings["model"] = objects["model"]
    if what in ("model", "optimizer", "config"):
        objects["tokenizer"] = AutoTokenizer.from_pretrained(settings["model"])
        objects["model"] = module() if what == "model" else AutoModelForCausalLM.from_pretrained(settings["model"])
    if what == "config":
        objects["model"].config.rms_norm_eps = 1e-5 + 1e-6 * other
    if what == "optimizer":
        del settings["learning_rate"]
        objects["optimizer"] = torch.optim.SGD(objects["model"].parameters(), lr=0.1 + 0.1 * other)
    if what == "reference":
        objects["ref_model"] = module()
    if what == "rows":
        lines = Path(objects["train_dataset"]).read_text().splitlines()
        objects["train_dataset"] = [json.loads(line) for line in (lines[1:] if other else lines)]
    if what in ("fit", "evaluate", "resume"):
        settings["eval_fraction"] = 0.2
    del settings["model"]
    trainer = tropism.KTOTrainer(**objects, **settings)
    if what == "evaluate":
        trainer.evaluate()
    else:
        trainer.fit(**{"resume": "auto"} if what == "resume" else {})


def one_rank(rank: int, size: int, port: int, jobs: list[Job], folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port)}
    from tropism.distributed import connect
    from tropism.errors import TropismError

    torch.set_num_threads(1)
    found = []
    with connect():
        for _, method, settings in jobs:
            began = time.monotonic()
            try:
                attempt(method, dict(settings[rank]))
                told, code = "", 0
            except TropismError as error:
                told, code = str(error), error.exit_code
            found.append((told, code, time.monotonic() - began))
    (folder / f"{rank}.json").write_text(json.dumps(found))


def test_each_difference_is_named_on_both_within_seconds(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> None:
    """X3: options, files, versions, data, and what a caller in Python passes; one pair of processes tries them all."""
    start_fork_server()
    jobs = jobs_of(tiny_model_dir, feedback, tmp_path)
    assert run_ranks(2, one_rank, jobs, tmp_path) == [0, 0]
    both = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for (named, _, _), one, other in zip(jobs, *both, strict=True):
        assert one[0] == other[0], named
        first = one[0].splitlines()[1].strip()
        assert first.startswith(f"{named}: process 0 has "), one[0]
        assert ", process 1 has " in first
        assert (one[1], other[1]) == (2, 2)
        assert max(one[2], other[2]) < 5  # beyond the start of the processes
    assert not (tmp_path / "run").exists()


# --- command lines ----------------------------------------------------------------------------------------------------


def _command_line(rank: int, size: int, port: int, arguments: list[list[str]], folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "TROPISM_STORE": f"{folder}/store"}
    os.dup2(os.open(f"{folder}/said-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.exit(main(arguments[rank]))


def assert_refused(found: list[tuple[int, str]], named: str) -> None:
    for code, said in found:
        assert code == 2, said
        assert f"\n  {named}: process 0 has " in said
        assert ", process 1 has " in said
        assert "Traceback" not in said


def test_two_command_lines_that_differ(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> None:
    """X3: two things at once; sharded, as is the default."""
    common = ["--model", str(tiny_model_dir), "--data", str(feedback), "--output", str(tmp_path / "run"), "--samples=0"]
    codes = run_ranks(2, _command_line, [["kto", *common, "--seed=1", "--max-steps=2"],
                                         ["kto", *common, "--seed=2", "--max-steps=3"]], str(tmp_path), limit_s=60)
    found = [(code, (tmp_path / f"said-{rank}").read_text()) for rank, code in enumerate(codes)]
    for named in ("--seed", "--max-steps"):
        assert_refused(found, named)
    assert not (tmp_path / "run").exists()


# --- started as people start them -------------------------------------------------------------------------------------


def started(arguments: list[list[str]], folders: list[str], folder: Path) -> list[tuple[int, str]]:
    """Exit code and stderr of two processes, each with arguments and a folder to import from of its own. Together they
    take less than LIMIT_S of a processor, most of it to import torch and transformers, whatever else runs here."""
    with free_port() as port:
        before, running = os.times(), []
        for rank, own in enumerate(arguments):
            environment = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TROPISM_STORE": str(folder / "store"),
                           "PYTHONPATH": os.pathsep.join([folders[rank], os.environ.get("PYTHONPATH", "")])}
            running.append(subprocess.Popen([sys.executable, "-m", "tropism", *own], env=environment, text=True,
                                            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL))
        try:
            found = [(one.communicate(timeout=60)[1], one.returncode) for one in running]
            after = os.times()
            took = sum(after[2:4]) - sum(before[2:4])
            print(f"{took:.1f} s of a processor, {after.elapsed - before.elapsed:.1f} s in all")
            assert took < LIMIT_S
            return [(code, said) for said, code in found]
        finally:
            for one in running:
                one.kill()
                one.wait()


REAL: list[tuple[str, list[str], list[str]]] = [
    ("--model: model.safetensors", [], ["--model", "{weights}"]),
    ("--model: tokenizer.json", [], ["--model", "{tokenizer}"]),
    ("--model: chat_template.jinja", [], ["--model", "{template}"]), ("--beta", ["--beta=0.1"], ["--beta=0.2"]),
    ("--seed", [], ["--seed=3"]), ("--max-steps", ["--max-steps=2"], ["--max-steps=3"]),
    ("--data", [], ["--data", "{fewer}"]), ("--data: order of the rows", [], ["--data", "{order}"]),
    ("--precision", [], ["--precision=fp64"]), ("version of transformers", [], ["{version}"]),
    ("code of tropism", [], ["{code}"]), ("--lora.rank", ["--lora.rank=2"], ["--lora.rank=4"]),
    ("--lora.adapter: adapter_model.safetensors", ["--lora.adapter", "{adapter}"], ["--lora.adapter", "{other}"]),
    ("--reference: model.safetensors", ["--reference", "{model}"], ["--reference", "{weights}"]),
    ("command", [], ["evaluate"])]


@pytest.fixture(scope="module")
def places(tiny_model_dir: Path, feedback: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("places")
    jobs_of(tiny_model_dir, feedback, folder)
    from tropism.config import SFTOptions
    from tropism.runner import run

    for name, seed in (("adapter", 0), ("other", 1)):
        rows = folder / "sft.jsonl"
        rows.write_text(json.dumps({"prompt": "oak", "completion": "elm"}) + "\n")
        run(SFTOptions(model=str(tiny_model_dir), data=str(rows), output=str(folder / name), lora={"rank": 2},
                       samples=0, seed=seed, store=str(folder / "store")))
    info = folder / "version" / "transformers-5.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.1.0\n")
    import tropism

    shutil.copytree(Path(tropism.__file__).parent, folder / "code" / "tropism")
    (folder / "code" / "tropism" / "losses" / "sft.py").open("a").write("# edited\n")
    return {"model": str(tiny_model_dir), "data": str(feedback), "folder": str(folder),
            **{name: str(folder / name) for name in ("weights", "tokenizer", "template", "version", "code")},
            **{name: str(folder / f"{name}.jsonl") for name in ("fewer", "order")},
            **{name: str(folder / name / "model") for name in ("adapter", "other")}}


@pytest.mark.slow
@pytest.mark.parametrize(("named", "one", "other"), REAL, ids=[entry[0] for entry in REAL])
def test_whatever_differs_between_command_lines(places: dict[str, str], named: str, one: list[str], other: list[str],
                                                tmp_path: Path) -> None:
    """X3: named on both, with exit code 2."""
    lines, folders = [], []
    for own in (one, other):
        own = [entry.format(**places) for entry in own]
        folders.append(own.pop() if own and own[0] in (places["version"], places["code"]) else "")
        if own == ["evaluate"]:
            lines.append(["evaluate", places["model"], "--data", places["data"]])
            continue
        defaults = {"--model": places["model"], "--data": places["data"], "--output": str(tmp_path / "run")}
        lines.append(["kto", *own, *(text for pair in defaults.items() if pair[0] not in own for text in pair)])
    assert_refused(started(lines, folders, tmp_path), named)
