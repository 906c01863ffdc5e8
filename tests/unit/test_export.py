"""Exports in parts: sizes, rounding, what is chosen and refused, and that a directory is whole or not there."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from exporting import IDS, filled_run, logits
from tropism.commands.export import export, output_directory, weights
from tropism.commands.export.weights import filled, rounded, skeleton
from tropism.errors import CheckpointError, ModelError, OutputError, OutputExistsError, TropismError, UsageError
from tropism.model import load, save
from tropism.model.source import ModelSource
from tropism.train.checkpoints import files as checkpoint


@pytest.fixture
def run(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A run that is done, with one checkpoint, whose weights are those of the result, less 1."""
    path = tmp_path / "run"
    shutil.copytree(tiny_model_dir, path / "model")
    filled_run(path, tiny_model_dir)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tensors = {f"model/{name}": weight.detach() - 1 for name, weight in model.named_parameters()}
    checkpoint.write(path / "checkpoints", 2, {**tensors, "optimizer/lm_head.weight/exp_avg": torch.ones(3)},
                     {"step": 2, "fingerprints": {"data": "a" * 32}, "stop_ids": [1, 5]})
    return path


@pytest.mark.parametrize(("size", "count"), [("5GB", 5 * 10**9), ("1.5 kb", 1500), ("2MiB", 2**21), (77, 77)])
def test_sizes(size: str | int, count: int) -> None:
    assert output_directory.shard_bytes(size) == count


@pytest.mark.parametrize("size", ["", "5 apples", "-1GB", "0", "GB"])
def test_what_is_no_size(size: str) -> None:
    with pytest.raises(UsageError, match="not a valid size"):
        output_directory.shard_bytes(size)


def test_rounding_is_counted_and_leaves_ties() -> None:
    """1 and -2 are bfloat16; 1 + 2^-8 is 2^-8 / (1 + 2^-8) = 0.39 % away; 1e-42 is 0 there."""
    one = torch.tensor([1.0, -2.0, 1 + 2**-8, 1e-42])
    given = {"a": one, "b": one, "count": torch.tensor([3])}
    found, rounding = rounded(given, torch.bfloat16)
    assert given == {}
    assert list(found) == ["a", "b", "count"]
    assert found["a"] is found["b"]
    assert found["count"].dtype == torch.int64
    assert (rounding.weights, rounding.exact, rounding.zeroed) == (4, 2, 1)
    assert rounding.largest == pytest.approx(2**-8 / (1 + 2**-8))
    assert "2 of 4 weights (50.0%) unchanged; the others change by at most 0.39%, and 1 becomes 0" in str(
        rounding)
    small = rounded({"a": torch.tensor([1.0, 1 + 2**-30], dtype=torch.float64)}, torch.float32)[1]
    assert "change by at most 9.3e-08%" in str(small)
    assert "the 1 weight unchanged" in str(rounded({"a": torch.ones(1)}, torch.float64)[1])


@pytest.mark.parametrize(("value", "text"), [(70000.0, "7e[+]04.*float16 is 65504"),
                                             (float("nan"), "w contains NaN")])
def test_a_weight_that_does_not_fit_is_refused(value: float, text: str) -> None:
    with pytest.raises(ModelError, match=text):
        rounded({"w": torch.tensor([1.0, value])}, torch.float16)


def test_every_weight_is_filled(tiny_model_dir: Path) -> None:
    """S1: none missing, left over or of another size; a tied head needs no name of its own."""
    config = load.load_config(ModelSource.of(str(tiny_model_dir)))
    model = skeleton(config)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    stored = {name: torch.rand(weight.shape) for name, weight in model.named_parameters()}
    found = filled(model, dict(stored), Path("c"))
    assert found.keys() == model.state_dict().keys()
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]
    name = "model.norm.weight"
    for wrong, text in (({key: stored[key] for key in stored if key != name}, f"c: {name} is missing"),
                        ({**stored, "odd": torch.ones(1)}, "c: odd is not part of the model LlamaForCausalLM"),
                        ({**stored, name: torch.ones(3)}, r"has shape \[3\], but \[32\] in LlamaForCausalLM")):
        with pytest.raises(CheckpointError, match=text):
            filled(model, wrong, Path("c"))


@pytest.mark.parametrize("kind", ["mixtral", "gemma3_text", "gpt2"])
def test_names_in_memory_and_names_in_files(tmp_path: Path, fixture_tokenizer: Any, kind: str) -> None:
    """S1: experts lie together in memory and one by one in files; embeddings are scaled by what no file has."""
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4} if kind == "gpt2" else {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, **({"num_local_experts": 4} if kind == "mixtral" else {})}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        kind, vocab_size=102, bos_token_id=0, eos_token_id=1, pad_token_id=2, **sizes)).eval()
    model.save_pretrained(tmp_path / "base")
    fixture_tokenizer.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.01 * torch.randn_like(weight)
        wanted = model(input_ids=IDS).logits
    run = filled_run(tmp_path / "run", tmp_path / "base")
    checkpoint.write(run / "checkpoints", 4, {f"model/{name}": weight.detach() for name, weight
                                              in model.named_parameters()}, {"step": 4, "fingerprints": {}})
    export(run, tmp_path / "out", checkpoint="last", max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    torch.testing.assert_close(logits(tmp_path / "out"), wanted, rtol=0, atol=1e-5)


REFUSED: dict[str, tuple[dict[str, Any], type[TropismError], str]] = {
    "dtype": ({"dtype": "int8"}, UsageError, "--dtype int8: unsupported.*fp32, bf16"),
    "size": ({"max_shard_size": "much"}, UsageError, "much: not a valid size"),
    "merge": ({"merge": True}, UsageError, "--merge: .*no adapter"),
    "best": ({"checkpoint": "best"}, UsageError, r"best.json: not found.*--keep-best.*step-00000002"),
    "step": ({"checkpoint": "step-00000009"}, UsageError, "no checkpoint of this step.*step-00000002"),
    "name": ({"checkpoint": "first"}, UsageError, "--checkpoint first: not best, last, a step or a directory"),
    "in model": ({"to": "model/out"}, UsageError, "belongs to the run"),
    "in checkpoints": ({"to": "checkpoints"}, UsageError, "belongs to the run"),
    "in use": ({"to": "."}, OutputExistsError, "exists and is not empty"),
    "a file": ({"to": "config.yaml"}, OutputExistsError, "exists and is not empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_come_before_anything_is_loaded(run: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.setattr(weights, "read_model", None)
    options, error, text = REFUSED[case]
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    to = run / options["to"] if "to" in options else run.parent / "out"
    with pytest.raises(error, match=text) as raised:
        export(run, to, **{name: value for name, value in options.items() if name != "to"})
    assert raised.value.exit_code == 2
    assert before == {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert not (run.parent / "out").exists()


def test_what_is_no_run(run: Path, tmp_path: Path) -> None:
    for place, text in ((tmp_path, "not a run directory"), (tmp_path / "gone", "not a run directory"),
                        (run / "model", f"tropism export {run}`"),
                        (run / "checkpoints" / "step-00000002", f"tropism export {run} --checkpoint step-00000002")):
        with pytest.raises(UsageError, match=text):
            export(place, tmp_path / "out")
    (run / "manifest.json").write_text("{")
    with pytest.raises(UsageError, match=r"manifest.json: cannot be read"):
        export(run, tmp_path / "out")


def test_a_result_that_is_not_what_was_written(run: Path, tmp_path: Path) -> None:
    file = run / "model" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model.safetensors has changed.*To export step-.*--checkpoint last"):
        export(run, tmp_path / "out")
    shutil.rmtree(run / "model")
    with pytest.raises(UsageError, match="model/ is missing"):
        export(run, tmp_path / "out")
    manifest = json.loads((run / "manifest.json").read_text())
    (run / "manifest.json").write_text(json.dumps({**manifest, "status": "running"}))
    with pytest.raises(UsageError, match=r"did not finish \(status: running\). To export step-.*--checkpoint last"):
        export(run, tmp_path / "out")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UsageError, match="has no checkpoint to export"):
        export(run, tmp_path / "out")
    with pytest.raises(UsageError, match="the run has no checkpoint"):
        export(run, tmp_path / "out", checkpoint="last")


def test_a_checkpoint_by_its_names_and_where_generation_stops(run: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    """Also of a run that never ended: the terminators that were trained stand in the checkpoint."""
    shutil.rmtree(run / "model")
    (run / "checkpoints" / "best.json").write_text(json.dumps(
        {"checkpoint": "step-00000002", "step": 2, "metric": "loss", "value": 0.25}))
    moved = tmp_path / "moved"
    shutil.copytree(run / "checkpoints" / "step-00000002", moved)
    wanted = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        for weight in wanted.parameters():
            weight -= 1
    for number, name in enumerate(("best", "last", "2", "step-00000002", str(moved))):
        done = export(run, tmp_path / f"out{number}", checkpoint=name)
        assert done.step == 2
        found = AutoModelForCausalLM.from_pretrained(done.path)
        assert all(torch.equal(found.state_dict()[key], value) for key, value in wanted.state_dict().items())
        assert json.loads((done.path / "generation_config.json").read_text())["eos_token_id"] == [1, 5]
    card = (tmp_path / "out0" / "README.md").read_text()
    assert "after step 2 of 4 planned steps, the best checkpoint by `loss` (0.2500)." in card


def test_without_a_record_of_the_terminators(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of before they were kept: the result's, else the tokenizer's own, and that is said."""
    old = {"step": 3, "fingerprints": {}}
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    checkpoint.write(run / "checkpoints", 3, {f"model/{name}": weight.detach() for name, weight
                                              in model.named_parameters()}, old)
    shutil.rmtree(run / "model")
    export(run, tmp_path / "out", checkpoint="3")
    assert "no record of the trained terminators" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 1


def test_a_checkpoint_that_cannot_be_used(run: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    place = run / "checkpoints" / "step-00000002"
    other = tmp_path / "other"
    checkpoint.write(other, 2, {"model/x": torch.ones(2)}, {"step": 2, "fingerprints": {"data": "f" * 32}})
    with pytest.raises(CheckpointError, match=r"not a checkpoint of .*: different data"):
        export(run, tmp_path / "out", checkpoint=str(other / "step-00000002"))
    checkpoint.write(other, 3, {"optimizer/x/y": torch.ones(2)}, {"step": 3, "fingerprints": {}})
    with pytest.raises(CheckpointError, match="no model weights"):
        export(run, tmp_path / "out", checkpoint=str(other / "step-00000003"))
    checkpoint.write(other, 4, {"model/x": torch.ones(2)}, {"step": 4, "fingerprints": {"template": "f" * 32}})
    with pytest.raises(CheckpointError, match=r"tokenizer .* was not found: .*the template of .* changed"):
        export(run, tmp_path / "out", checkpoint=str(other / "step-00000004"))
    (place / "state" / ".metadata").write_bytes(b"a pickle of somebody else's")
    with pytest.raises(CheckpointError, match=r"\.metadata: corrupted file.*The run has no other checkpoint"):
        export(run, tmp_path / "out", checkpoint="last")
    assert not (tmp_path / "out").exists()


def test_the_disk_is_looked_at_first(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.setattr(weights, "read_model", None)
    for named in (None, "last"):
        with pytest.raises(OutputError, match=r"out: cannot be written: [\d,]+ bytes are needed, 1,000 are free"):
            export(run, tmp_path / "out", checkpoint=named)


def _interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def _lose(real: Callable[..., None]) -> Callable[..., None]:
    def write(model: Any, tokenizer: Any, path: Path, *rest: Any) -> None:
        """A disk that keeps another value than it was given."""
        real(model, tokenizer, path, *rest)
        content = bytearray((path / "model.safetensors").read_bytes())
        content[-1] ^= 64
        (path / "model.safetensors").write_bytes(content)

    return write


@pytest.mark.parametrize(("what", "error", "text"), [
    ("interrupted", KeyboardInterrupt, None),
    ("lost", OutputError, "failed verification.*has different values")])
def test_whole_or_not_at_all(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str,
                             error: type[BaseException], text: str | None) -> None:
    """S1: and what an export that was killed left behind goes with the next one."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        if what == "interrupted":
            patch.setattr(AutoTokenizer.from_pretrained(run / "model").__class__, "save_pretrained", _interrupt)
        else:
            patch.setattr(save, "write_model", _lose(save.write_model))
        with pytest.raises(error, match=text):
            export(run, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "half.safetensors").write_bytes(b"half")
    out.mkdir()  # empty: it may be there
    export(run, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert torch.equal(logits(out), logits(run / "model"))
    assert {(out / "model.safetensors").stat().st_mode & 0o777} == {(out / "config.json").stat().st_mode & 0o777}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True,
                          check=False) if shutil.which("mount") else None
    if done is None or done.returncode:
        pytest.skip("no right to mount a small disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_fills_up(run: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S1: half a model would keep the disk full."""
    monkeypatch.setattr("tropism.commands.export.run.check_space", lambda *args: None)  # the space is gone
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - 64 * 1024))
    with pytest.raises(OutputError, match=r"the model could not be written.*bytes are needed"):
        export(run, small_disk / "out")
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


@pytest.mark.parametrize("tokenizer_bytes", [0, 300_000])
def test_an_export_that_passes_the_check_of_space_fits(tiny_model_dir: Path, small_disk: Path, tmp_path: Path,
                                                       tokenizer_bytes: int) -> None:
    """Also with a tokenizer that is larger than the weights."""
    shutil.copytree(tiny_model_dir, tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    tokenizer.chat_template = "{# " + "x" * tokenizer_bytes + " #}" + (tokenizer.chat_template or "")
    tokenizer.save_pretrained(tmp_path / "run" / "model")
    run = filled_run(tmp_path / "run", tiny_model_dir)
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096))
    with pytest.raises(OutputError, match="are needed") as error:
        export(run, small_disk / "out")
    found = re.search(r"([\d,]+) bytes are needed", str(error.value))
    assert found is not None
    needed = int(found[1].replace(",", ""))
    assert needed > tokenizer_bytes
    (small_disk / "ballast").unlink()
    (small_disk / "ballast").write_bytes(bytes(shutil.disk_usage(small_disk).free - needed))
    export(run, small_disk / "out")
