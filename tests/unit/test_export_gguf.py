"""GGUF files beside an export: what is checked before, how the converter is found, and that the file says the same."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from exporting import filled_run
from helpers import kind_of_tokenizer
from tropism.cli.app import main
from tropism.commands.export import export, gguf, weights
from tropism.errors import OutputError, TropismError, UsageError

pytest.importorskip("gguf", reason="the extra gguf is not installed")
QUANTIZER = """#!/bin/sh
echo "$@" > "$(dirname "$0")/called"
cp "$1" "$2"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is done, of a Llama that tells texts apart."""
    place = tmp_path_factory.mktemp("gguf")
    tokenizer = kind_of_tokenizer("byte level")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=96, initializer_range=0.15, tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)).save_pretrained(place / "base")
    tokenizer.save_pretrained(place / "base")
    shutil.copytree(place / "base", place / "run" / "model")
    filled_run(place / "run", place / "base")
    manifest = json.loads((place / "run" / "manifest.json").read_text())
    manifest["stop_ids"] = [tokenizer.eos_token_id]
    (place / "run" / "manifest.json").write_text(json.dumps(manifest))
    return place / "run"


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Path:
    """A directory with programs under the names of llama.cpp's."""
    place = tmp_path / "llama.cpp"
    (place / "build" / "bin").mkdir(parents=True)
    shutil.copy(Path(__file__).parents[1] / "gguf_writing.py", place / "convert_hf_to_gguf.py")
    (place / "build" / "bin" / "llama-quantize").write_text(QUANTIZER)
    (place / "build" / "bin" / "llama-quantize").chmod(0o755)
    return place


@pytest.fixture(autouse=True)
def _nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No llama.cpp of this machine is found."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(gguf, "_USUAL", (str(tmp_path / "usual"),))


def test_a_gguf_file_computes_what_the_model_computes(run: Path, llama_cpp: Path, tmp_path: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a out"
    assert main(["export", str(run), "--to", str(out), "--gguf", "q8_0", "--llama-cpp", str(llama_cpp),
                 "--ollama"]) == 0
    said = capsys.readouterr().out
    assert "model-q8_0.gguf: same token ids. Log-probs of" in said
    facts = json.loads((out / "export.json").read_text())
    found = facts["serving"]["gguf"]
    assert facts["serving"]["problems"] == []
    assert len(facts["serving"]["checked"]) == 2
    assert found["file"] == "model-q8_0.gguf"
    assert 0 < found["mean_logp_change"] < found["largest_logp_change"] < 0.5
    assert found["same_argmax"] > 0.9 * found["tokens"] > 90
    assert {"model-q8_0.gguf", "Modelfile"} <= facts["files"].keys()
    model = AutoModelForCausalLM.from_pretrained(out, gguf_file="model-q8_0.gguf")
    plain = AutoModelForCausalLM.from_pretrained(out)
    ids = AutoTokenizer.from_pretrained(out)("Name a root vegetable.", return_tensors="pt").input_ids
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=0.5)
    assert (out / "Modelfile").read_text().startswith('FROM ./model-q8_0.gguf\nTEMPLATE """')
    card = (out / "README.md").read_text()
    for line in ("vllm serve './a out' '--served-model-name=a out' --dtype float32\n",
                 "llama-server -m './a out/model-q8_0.gguf' '--alias=a out' --jinja\n",
                 "ollama create a-out -f './a out/Modelfile' && ollama run a-out\n",
                 f"the most probable token is the same for {found['same_argmax']} of"):
        assert line in card
    assert not list(tmp_path.glob(".*"))


def test_the_quantizer_gets_what_the_converter_wrote(run: Path, llama_cpp: Path, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Both on PATH; the file between them does not stay. If it stops elsewhere than the training, that is said."""
    monkeypatch.setenv("FAKE_CONVERTER", "end")
    places = [str(llama_cpp), str(llama_cpp / "build" / "bin"), "/usr/bin", "/bin"]
    (llama_cpp / "convert_hf_to_gguf.py").chmod(0o755)
    monkeypatch.setenv("PATH", ":".join(places))
    export(run, tmp_path / "out", dtype="fp16", gguf="q4_k_m")
    first, second, form = (llama_cpp / "build" / "bin" / "called").read_text().split()
    assert (Path(first).name, Path(second).name, form) == ("model-unquantized.gguf", "model-q4_k_m.gguf", "Q4_K_M")
    assert [file.name for file in (tmp_path / "out").glob("*.gguf")] == ["model-q4_k_m.gguf"]
    assert json.loads((tmp_path / "out" / "export.json").read_text())["serving"]["gguf"]["mean_logp_change"] < 1e-2
    assert "model-q4_k_m.gguf ends at" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(("fault", "text"), [
    ("weights", "log-probs differ by .* nats on average, which rounding does not explain"),
    ("tokens", "its tokenizer reads .* as .*, but .* were trained"),
    ("nothing", "convert_hf_to_gguf.py failed with exit code 0: no output"),
    ("garbage", "transformers cannot read it back to compare it: .*Export without --gguf")])
def test_a_file_that_does_not_say_the_same(run: Path, llama_cpp: Path, tmp_path: Path, fault: str, text: str,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CONVERTER", fault)
    shutil.copytree(run / "model", tmp_path / "copy")
    with pytest.raises(OutputError, match=text):
        gguf.write(gguf.find_converter("f16", llama_cpp), tmp_path / "copy", "name", torch.float32, False)


def test_a_converter_that_fails_leaves_nothing(run: Path, llama_cpp: Path, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CONVERTER", "crash")
    with pytest.raises(OutputError, match="failed with exit code 1: ModuleNotFoundError: No module named 'a_package"):
        export(run, tmp_path / "out", gguf="f16", llama_cpp=llama_cpp)
    assert {path.name for path in tmp_path.iterdir()} == {"llama.cpp"}


def test_what_is_missing_is_said_before_weights_are_read(run: Path, llama_cpp: Path, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.setattr(weights, "read_model", None)
    (tmp_path / "none").mkdir()
    shutil.rmtree(llama_cpp / "build")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"gguf": "q5_k"}, "--gguf q5_k: unsupported"),
        ({"gguf": "q8_0"}, "convert_hf_to_gguf.py of llama.cpp not found in PATH. Get llama.cpp with `git clone"),
        ({"gguf": "q8_0", "llama_cpp": tmp_path / "none"}, "not found in .*none"),
        ({"gguf": "q4_k_m", "llama_cpp": llama_cpp}, "llama-quantize of llama.cpp not found in .*--gguf q8_0"),
        ({"llama_cpp": llama_cpp}, "--llama-cpp has no effect without --gguf")]
    for options, text in cases:
        with pytest.raises(UsageError, match=text) as raised:
            export(run, tmp_path / "out", **options)
        assert raised.value.exit_code == 2
    monkeypatch.setattr(gguf.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TropismError, match=r"pip install 'tropism\[gguf\]'"):
        export(run, tmp_path / "out", gguf="q8_0", llama_cpp=llama_cpp)
    assert not (tmp_path / "out").exists()


def test_which_python_runs_a_script(tmp_path: Path) -> None:
    """A script for any Python runs with this one; a program with an interpreter of its own as it is."""
    script = tmp_path / "convert_hf_to_gguf.py"
    for first, runnable, own in (("#!/usr/bin/env python3", True, False), ("#!/opt/x/bin/python3.12", True, True),
                                 ("#!/bin/sh", True, True), ("import sys", True, False), ("#!/bin/sh", False, False)):
        script.write_text(f"{first}\n")
        script.chmod(0o755 if runnable else 0o644)
        found = gguf.find_converter("f16", tmp_path).convert
        assert found == ((str(script),) if own else (sys.executable, str(script)))


@pytest.mark.slow
@pytest.mark.parametrize("form", gguf.BYTES_PER_WEIGHT)
def test_with_llama_cpp(test_data: Path, tmp_path: Path, form: str) -> None:
    """The real converter, in the directory TROPISM_LLAMA_CPP."""
    if "TROPISM_LLAMA_CPP" not in os.environ:
        pytest.skip("TROPISM_LLAMA_CPP is not set")
    model = test_data / "models" / "stories260K"
    shutil.copytree(model, tmp_path / "run" / "model")
    filled_run(tmp_path / "run", model)
    try:
        export(tmp_path / "run", tmp_path / "out", gguf=form, llama_cpp=os.environ["TROPISM_LLAMA_CPP"])
    except UsageError as error:
        pytest.skip(str(error))
    found = json.loads((tmp_path / "out" / "export.json").read_text())["serving"]["gguf"]
    assert found["mean_logp_change"] < {"f32": 1e-5, "f16": 0.01, "bf16": 0.05, "q8_0": 0.1, "q4_k_m": 0.5}[form]
