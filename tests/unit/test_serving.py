"""What a card says of serving: commands that a shell reads as meant, and what was compared with the training."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PromptTuningConfig

from exporting import filled_run
from hostile import is_harmless
from tropism.commands.export import export
from tropism.commands.export.read_run import ExportedRun
from tropism.commands.export.serving import Serving, command, commands, lora_problem, remarks

FACTS: dict[str, Any] = {"base": "o/base", "adapter": False, "merged": False, "dtype": "bfloat16"}
WORDS = st.text(st.characters(exclude_characters="\0") | st.sampled_from("'\"\\$`!&<>\n \udc80{}*~="), max_size=12)


def words(line: str) -> list[str]:
    """The words of a command, as bash reads them."""
    done = subprocess.run(["/bin/bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    return [word.decode("utf-8", "surrogateescape") for word in done.stdout.split(b"\0")[:-1]]


@settings(max_examples=25)
@given(given=st.lists(WORDS, min_size=1, max_size=8))
def test_a_shell_reads_the_words_that_are_meant(given: list[str]) -> None:
    line = command("vllm", *given)
    assert is_harmless(line)
    assert "\n" not in line
    assert not set(line) & set("<&")
    assert words(line) == ["vllm", *given]


def vllm(name: str = "first", config: Any = None, serving: Serving | None = None, options: dict[str, Any] | None = None,
         **facts: Any) -> list[str]:
    found = dict(commands(ExportedRun(Path("r"), {}, options or {}), {**FACTS, **facts}, name, config,
                          serving or Serving()))
    return words(found["vLLM"]) if "vLLM" in found else []


@pytest.mark.parametrize("name", ["first", "my model", "-x", "a'b", "x&<y>", "$(id)", "a=b,{c}"])
def test_a_model_under_any_name(name: str) -> None:
    assert vllm(name) == ["vllm", "serve", f"./{name}", f"--served-model-name={name}", "--dtype", "bfloat16"]
    assert vllm(name, dtype="float64")[-1] == "float32"
    found = vllm(name, options={"chat_template_kwargs": "enable_thinking=false"}, needs_code=True)
    assert found[-3:] == ["--default-chat-template-kwargs", '{"enable_thinking": false}', "--trust-remote-code"]


@pytest.mark.parametrize(("name", "rank", "allowed"), [("first", 8, 8), ("a=b", 9, 16), ("a,b", 65, 128),
                                                       ("{x", 512, 512)])
def test_an_adapter_with_its_base(name: str, rank: int, allowed: int) -> None:
    """`--lora-modules` splits at an equals sign, and takes JSON for other names. The base has its own stop tokens."""
    found = vllm(name, LoraConfig(r=4, rank_pattern={"q": rank}), adapter=True, dtype="float32")
    module = f"{name}=./{name}" if name == "first" else json.dumps({"name": name, "path": f"./{name}"})
    assert found == ["vllm", "serve", "o/base", "--enable-lora", "--lora-modules", module, "--max-lora-rank",
                     str(allowed), "--dtype", "bfloat16", "--tokenizer", f"./{name}", "--generation-config",
                     f"./{name}"]
    assert vllm(config=LoraConfig(r=4), adapter=True, base="base")[2] == "./base"
    assert vllm(config=LoraConfig(r=4), adapter=True, merged=True)[2] == "./first"


def test_the_base_at_a_revision() -> None:
    """It is no part of a model's name. vLLM reads a tokenizer on the Hub at the base's revision unless told another."""
    local = vllm("first", LoraConfig(r=8), adapter=True, base="o/base@abc")
    assert local[:6] == ["vllm", "serve", "o/base", "--revision", "abc", "--enable-lora"]
    there = vllm("me/first", LoraConfig(r=8), adapter=True, base="o/base@refs/pr/1")
    assert there[2:8] == ["o/base", "--revision", "refs/pr/1", "--tokenizer-revision", "main", "--enable-lora"]
    assert there[there.index("--lora-modules") + 1] == "me/first=me/first"
    assert there[-4:] == ["--tokenizer", "me/first", "--generation-config", "me/first"]


def test_a_model_on_the_hub_is_served_from_there() -> None:
    """`./owner/name` is no directory that its reader has."""
    found = dict(commands(ExportedRun(Path("r"), {}, {}), FACTS, "me/First", None, Serving(
        gguf={"file": "model-q8_0.gguf"}, modelfile=[])))
    assert words(found["vLLM"])[1:3] == words(found["transformers"])[1:3] == ["serve", "me/First"]
    assert words(found["llama.cpp"])[1:5] == ["--hf-repo", "me/First", "--hf-file", "model-q8_0.gguf"]
    assert found["Ollama"].split(" && ") == [
        "hf download me/First --local-dir ./me-first", "ollama create me-first -f ./me-first/Modelfile",
        "ollama run me-first"]


@pytest.mark.parametrize(("config", "reason"), [
    (LoraConfig(r=4, use_dora=True), "DoRA"), (LoraConfig(r=4, modules_to_save=["lm_head"]), "modules_to_save"),
    (LoraConfig(r=513), "rank is above 512"), (LoraConfig(r=4, bias="all"), "biases"),
    (PromptTuningConfig(num_virtual_tokens=2), "type PROMPT_TUNING")])
def test_adapters_that_vllm_does_not_load(config: Any, reason: str) -> None:
    assert reason in str(lora_problem(config))
    assert vllm(config=config, adapter=True) == []
    run = ExportedRun(Path("r"), {}, {})
    (said,) = remarks(run, {**FACTS, "adapter": True}, config, Serving())
    assert reason in said
    assert "Export it with --merge." in said
    assert lora_problem(LoraConfig(r=4, use_rslora=True)) is None
    assert vllm(config=LoraConfig(r=4), adapter=True, serving=Serving(gguf_base=True)) == []


def test_what_differs_from_the_training_is_said(tiny_model_dir: Path, tmp_path: Path,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """Stop tokens and the template, in the output and in the card; what agrees in the card."""
    shutil.copytree(tiny_model_dir, tmp_path / "run" / "model")
    run = filled_run(tmp_path / "run", tiny_model_dir, system_prompt="Be *brief*.")
    manifest = json.loads((run / "manifest.json").read_text())
    found = []
    for number, changes in enumerate((
            {"stop_ids": [1]}, {"stop_ids": [1, 4], "fingerprints": {"template": "f" * 32}}, {})):
        (run / "manifest.json").write_text(json.dumps({**manifest, **changes}))
        export(run, tmp_path / f"out{number}")
        found.append((capsys.readouterr().out, (tmp_path / f"out{number}" / "README.md").read_text()))
    (said, card), (other, other_card), (old, old_card) = found
    assert "note:" not in said
    for fact in ("generation_config.json stops at every token that ended a completion in training",
                 "the chat template renders a message as in training"):
        assert f"Checked: {fact}." in card
        assert fact not in other_card
    assert r"It is: Be \*brief\*." in card
    assert "Completions ended with <|end|> (4) in training, but generation_config.json does not stop there" in other
    assert "The written chat template differs from that of the training." in other
    assert other.count("note:") == 2
    assert "differs from that of the training." in other_card
    assert "no record of the tokens that ended its completions" in old
    assert "no record of the tokens" in old_card
    assert json.loads((tmp_path / "out1" / "export.json").read_text())["serving"]["checked"] == []


def test_a_model_of_plain_text(tiny_model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dir, tmp_path / "run" / "model")
    (tmp_path / "run" / "model" / "chat_template.jinja").unlink()
    run = filled_run(tmp_path / "run", tiny_model_dir)
    export(run, tmp_path / "out", ollama=True)
    assert "There is no chat template: the model continues plain text, by /v1/completions." in (
        tmp_path / "out" / "README.md").read_text()
    modelfile = (tmp_path / "out" / "Modelfile").read_text()
    assert modelfile.startswith("FROM .\nPARAMETER stop ")
    assert "# TEMPLATE is left out" in modelfile
