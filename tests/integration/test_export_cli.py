"""`tropism export` of real runs: what loads in a fresh process with plain transformers, and what its card says."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from exporting import IDS
from integration.conftest import records
from tropism.cli.app import main
from tropism.cli.commands import app
from tropism.commands.verify import verify
from tropism.config import METHODS
from tropism.distributed import connect
from tropism.runner import Run

SURFACE = {"RUN", "--to", "--merge", "--no-merge", "--dtype", "--checkpoint", "--max-shard-size", "--base",
           "--trust-remote-code", "--no-trust-remote-code", "--gguf", "--llama-cpp", "--ollama", "--no-ollama",
           "--push", "--private", "--no-private"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

FRESH = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
ids, found = torch.load(sys.argv[1]), {}
for path in sys.argv[3:]:
    model, report = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
    tokenizer = AutoTokenizer.from_pretrained(path)
    found[path] = (logits, str(model.dtype), model.generation_config.eos_token_id, tokenizer.chat_template,
                   tokenizer("Name a tree.")["input_ids"])
torch.save(found, sys.argv[2])
assert "tropism" not in sys.modules
"""


class Made(NamedTuple):
    """A run, and the weights that it ended with, in memory."""

    path: Path
    state: dict[str, torch.Tensor]
    config: Any


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, fixture_tokenizer: Any) -> dict[bool, Made]:
    """A short run on chats of a model with a tied head, and of one with a head of its own."""
    place = tmp_path_factory.mktemp("exports")
    rows = [{"messages": [{"role": "user", "content": f"name a tree {'abcdefgh'[n % 8]}"},
                          {"role": "assistant", "content": "oak elm ash fir yew"[n % 9:n % 9 + 6]}], "label": n % 3 > 0}
            for n in range(24)]
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": []}]))
    found = {}
    for tied in (True, False):
        model = place / f"model-{tied}"
        config = AutoConfig.from_pretrained(tiny_model_dir)
        config.tie_word_embeddings = tied
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        fixture_tokenizer.save_pretrained(model)
        options = METHODS["kto"](
            model=str(model), data=str(place / "data.jsonl"), output=str(place / f"run-{tied}"), samples=0,
            store=str(place / "store"), batch_size=8, max_steps=4, learning_rate=1e-2, eval_fraction=0.2, eval_every=2,
            save_every=2, keep_best="rewards/auc", checkpoint_model=True)
        with connect() as world:
            run = Run(options, world)
            run.fit()
        assert run.engine is not None
        state = {name: weight.clone() for name, weight in run.engine.model.module.state_dict().items()}
        found[tied] = Made(place / f"run-{tied}", state, config)
    return found


def in_memory(state: dict[str, torch.Tensor], config: Any, dtype: torch.dtype) -> torch.Tensor:
    """Logits of a plain model with these weights, each cast to a dtype; rotary frequencies stay in float32, as they do
    wherever a model is loaded."""
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(state)
    with torch.no_grad():
        for weight in model.parameters():
            weight.data = weight.data.to(dtype)
        found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def test_the_surface_changes_only_on_purpose() -> None:
    found = list(app["export"].assemble_argument_collection())
    assert {name for argument in found for name in argument.names} == SURFACE
    assert [argument.names[0] for argument in found if argument.required] == ["RUN", "--to"]
    code = ("import sys; from tropism.cli.app import main\ntry: main(['export', '--help'])\nexcept SystemExit: pass\n"
            "assert not {'torch', 'transformers', 'peft'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in SURFACE if not name.startswith("--no-"))


def test_a_fresh_process_finds_what_was_in_memory(made: dict[bool, Made], tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """S1: result and checkpoint, tied and not, in every dtype, in one file and in several."""
    wanted: dict[str, tuple[torch.Tensor, str]] = {}
    stops = None
    for tied, (run, state, config) in made.items():
        half = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step-00000002" / "model").state_dict()
        for number, (options, weights, dtype) in enumerate((
                ([], state, "float32"), (["--dtype", "bf16", "--max-shard-size", "20KB"], state, "bfloat16"),
                (["--dtype", "float16", "--checkpoint", "last"], state, "float16"),
                (["--checkpoint", "step-00000002"], half, "float32"),
                (["--checkpoint", "2", "--dtype", "bfloat16", "--max-shard-size", "30KB"], half, "bfloat16"))):
            to = tmp_path / f"{tied}-{number}"
            before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
            assert main(["export", str(run), "--to", str(to), *options]) == 0
            assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
            said = capsys.readouterr().out
            assert ("unchanged" in said) is (dtype != "float32")
            check_files(to, tied, dtype, sharded="--max-shard-size" in options)
            wanted[str(to)] = in_memory(weights, config, DTYPES[dtype]), f"torch.{dtype}"
        assert json.loads((run / "checkpoints" / "step-00000002" / "trainer.json").read_text())["stop_ids"]
        stops = AutoModelForCausalLM.from_pretrained(run / "model").generation_config.eos_token_id
        tokenizer = AutoTokenizer.from_pretrained(run / "model")
        assert verify(run).intact
    torch.save(IDS, tmp_path / "ids")
    subprocess.run([sys.executable, "-c", FRESH, str(tmp_path / "ids"), str(tmp_path / "found"), *wanted], check=True)
    for path, (logits, dtype, eos, template, ids) in torch.load(tmp_path / "found").items():
        assert dtype == wanted[path][1]
        torch.testing.assert_close(logits, wanted[path][0], rtol=0, atol=1e-5)
        assert (eos, template, ids) == (stops, tokenizer.chat_template, tokenizer("Name a tree.")["input_ids"])


def test_a_run_that_never_ended(made: dict[bool, Made], tmp_path: Path) -> None:
    """S1: a checkpoint has what is needed: the terminators that were trained, and the tokenizer's fingerprint."""
    run = tmp_path / "run"
    shutil.copytree(made[True].path, run)
    ended = json.loads((run / "model" / "generation_config.json").read_text())["eos_token_id"]
    manifest = json.loads((run / "manifest.json").read_text())
    trainer = json.loads((run / "checkpoints" / "step-00000004" / "trainer.json").read_text())
    assert trainer["stop_ids"] == manifest.pop("stop_ids")
    assert set(trainer["stop_ids"]) <= set(ended if isinstance(ended, list) else [ended])
    shutil.rmtree(run / "model")
    (run / "manifest.json").write_text(json.dumps({**manifest, "status": "stopped"}))
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--checkpoint", "last"]) == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == ended
    assert cell((tmp_path / "out" / "README.md").read_text(), "run status") == "stopped"


def check_files(path: Path, tied: bool, dtype: str, sharded: bool) -> None:
    """S1: the dtype of file, config and name agree; a tied head is one tensor; several files have an index."""
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    assert (len(files) > 1) is sharded
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{dtype}"}
    assert json.loads((path / "config.json").read_text())["dtype"] == dtype
    assert ("lm_head.weight" in tensors) is not tied
    index = path / "model.safetensors.index.json"
    assert index.exists() is sharded
    if sharded:
        assert json.loads(index.read_text())["weight_map"].keys() == tensors.keys()
    known = json.loads((path / "export.json").read_text())
    assert known["dtype"] == dtype
    assert known["files"].keys() == {file.name for file in path.iterdir()} - {"export.json"}


def front_matter(card: str) -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load(card.split("---\n")[1])
    return parsed


def cell(card: str, key: str) -> str:
    """The value that stands beside a key in one of the card's tables."""
    return next(line for line in card.splitlines() if line.startswith(f"| {key} |")).split("|", 2)[2].strip(" |")


def test_the_card_says_what_the_run_said(made: dict[bool, Made], tmp_path: Path) -> None:
    """Every fact that stands in it is one of the run's files."""
    run = made[True].path
    assert main(["export", str(run), "--to", str(tmp_path / "named")]) == 0
    card = (tmp_path / "named" / "README.md").read_text()
    manifest, audit, options = (json.loads((run / "manifest.json").read_text()),
                                json.loads((run / "audit.json").read_text()),
                                yaml.safe_load((run / "config.yaml").read_text()))
    front = front_matter(card)
    index = front.pop("model-index")
    assert front == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["tropism", "kto"]}
    assert card.split("---\n")[2].strip().startswith("# named\n")
    assert f"`{Path(options['model']).name}` by KTO" in card
    assert f"Training data: `{Path(audit['source']).name}`" in card
    for key, value in {"rows read": audit["rows"]["read"], "rows kept": audit["rows"]["kept"],
                       "rows dropped": "1 " + next(iter(audit["rows"]["dropped"])),
                       "labeled desirable": audit["labels"]["desirable"], "rows held out": audit["split"]["eval"],
                       "optimizer steps": manifest["steps"], "seed": 0, "batch size": 8, "learning rate (peak)": 0.01,
                       "precision": "fp32", "device": "1 x cpu", "`beta`": 0.1, "`loss`": "kto",
                       "initial weights": f"`{manifest['policy']}`",
                       **{key: f"`{value}`" for key, value in manifest["fingerprints"].items()}}.items():
        assert cell(card, key) == str(value), key
    assert f"torch {manifest['libraries']['torch']}" in cell(card, "libraries")
    first, last = (next(record for record in found if record["split"] == "eval")
                   for found in (records_of(run), records_of(run)[::-1]))
    measured = card.split("## Evaluation")[1]
    for key in ("loss", "rewards/margins", "logps/chosen"):
        assert cell(measured, f"`{key}`") == f"{first[key]:.4f} | {last[key]:.4f}".replace("-0.0000", "0.0000")
    assert cell(card, "`rewards/auc`").endswith(
        f"| {last['rewards/auc']:.4f} [{last['rewards/auc_low']:.4f}, {last['rewards/auc_high']:.4f}]")
    metric = index[0]["results"][0]["metrics"][0]
    assert (metric["type"], metric["args"]["rows"]) == ("roc_auc", audit["split"]["eval"])
    assert metric["value"] == pytest.approx(last["rewards/auc"], abs=5e-5)
    assert "grants no license and names none" in card
    assert "license:" not in card


def records_of(run: Path) -> list[dict[str, Any]]:
    class Result(NamedTuple):
        directory: Path

    return records(Result(run))


def test_a_card_claims_nothing_that_was_not_measured(train: Callable[..., Any], tmp_path: Path) -> None:
    """No rows were held out; and a checkpoint between two evaluations has no figures."""
    result = train("dpo", max_steps=3, save_every=1, keep=0, loss="sigmoid,sft", loss_weights="1,0.5")
    assert main(["export", str(result.directory), "--to", str(tmp_path / "a")]) == 0
    card = (tmp_path / "a" / "README.md").read_text()
    assert "No rows were held out" in card
    assert "| before | after |" not in card
    assert cell(card, "`loss_weights`") == "1,0.5"
    assert "temperature" not in card
    result = train("dpo", max_steps=3, save_every=1, keep=0, eval_fraction=0.2, eval_every=0)
    assert main(["export", str(result.directory), "--to", str(tmp_path / "b"), "--checkpoint", "2"]) == 0
    card = (tmp_path / "b" / "README.md").read_text()
    assert "These weights, after step 2, were not evaluated. The run evaluated after steps 0, 3." in card
    assert "| before | after |" not in card


def test_the_best_one_and_exit_codes(made: dict[bool, Made], tmp_path: Path,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    run = made[True].path
    best = json.loads((run / "checkpoints" / "best.json").read_text())
    assert main(["export", str(run), "--to", str(tmp_path / "best"), "--checkpoint", "best"]) == 0
    assert json.loads((tmp_path / "best" / "export.json").read_text())["checkpoint"] == best["checkpoint"]
    assert f"best checkpoint by `rewards/auc` ({best['value']:.4f})" in (tmp_path / "best" / "README.md").read_text()
    for tokens, text in ((["--to", str(tmp_path / "best")], "is not empty"),
                         (["--to", str(tmp_path / "out"), "--merge"], "no adapter to merge"),
                         (["--to", str(tmp_path / "out"), "--dtype", "int4"], "int4"), ([], "--to"),
                         (["--to", str(tmp_path / "out"), "--checkpoint", "9"], "no checkpoint of this step")):
        assert main(["export", str(run), *tokens]) == 2
        assert text in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("in the way")
    assert main(["export", str(run), "--to", str(tmp_path / "file" / "out")]) == 1
    assert "the model could not be written: Not a directory" in capsys.readouterr().err


def test_ctrl_c_leaves_nothing(made: dict[bool, Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                               capsys: pytest.CaptureFixture[str]) -> None:
    """X1: of half a model nothing stays, and the sentence says so."""
    from tropism.commands.export import run as exporting

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "read_back", interrupted)
    assert main(["export", str(made[True].path), "--to", str(tmp_path / "out")]) == 1
    assert f"interrupted. {tmp_path}/out is unchanged" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
