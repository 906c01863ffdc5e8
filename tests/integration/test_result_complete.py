"""A run ends with its model: what cannot be saved is found or corrected before step 1."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from tropism.cli.app import main
from tropism.errors import ModelError, OutputError
from tropism.model import save

LLAMA_2 = {"do_sample": False, "temperature": 0.9, "top_p": 0.6}


@pytest.fixture
def odd_model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model whose generation config transformers reads and does not save, as published ones have it."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model_dir, path)
    (path / "generation_config.json").write_text(json.dumps(LLAMA_2))
    return path


def _rows(path: Path) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"ask {word}", "completion": f" tell {word}"}) + "\n"
                            for word in ("one", "two", "three", "four")))
    return path


@pytest.mark.parametrize("lora", [(), ("--lora.rank", "2")])
def test_an_odd_generation_config(odd_model: Path, tmp_path: Path, lora: tuple[str, ...],
                                  capsys: pytest.CaptureFixture[str]) -> None:
    """The run says once what it corrects, ends with its model, and can be exported from a checkpoint."""
    run, data = tmp_path / "run", _rows(tmp_path / "rows.jsonl")
    assert main(["sft", "--model", str(odd_model), "--data", str(data), "--output", str(run), "--max-steps", "2",
                 "--batch-size", "4", "--save-every", "1", *lora]) == 0
    said = capsys.readouterr()
    assert (said.out + said.err).count("do_sample is set to true") == 1
    for path, made in ((run / "model", True), (tmp_path / "export", False)):
        if not made:
            assert main(["export", str(run), "--to", str(path), "--checkpoint", "step-00000001"]) == 0
        found = GenerationConfig.from_pretrained(path)
        assert (found.do_sample, found.temperature, found.top_p) == (True, 0.9, 0.6)


@pytest.mark.some(4)
@pytest.mark.parametrize("settings", [
    {"stop_strings": ["x"]}, {"cache_implementation": "quantized"}, {"token_healing": True}, {"num_beams": 3},
    {"return_dict_in_generate": True, "output_scores": True}, {"num_beams": 2, "num_beam_groups": 2},
    {"min_length": 30}, {"forced_eos_token_id": 3}, {"guidance_scale": 2.0}], ids=lambda settings: next(iter(settings)))
def test_samples_are_greedy_whatever_the_generation_config_says(settings: dict[str, Any], tiny_model_dir: Path,
                                                                odd_model: Path, tmp_path: Path) -> None:
    """Stop strings need a tokenizer, and other settings need packages: samples need neither."""
    (odd_model / "generation_config.json").write_text(json.dumps(settings))
    data, found = _rows(tmp_path / "rows.jsonl"), []
    for number, model in enumerate((tiny_model_dir, odd_model)):
        run = tmp_path / f"run{number}"
        assert main(["sft", "--model", str(model), "--data", str(data), "--output", str(run), "--max-steps", "1",
                     "--batch-size", "4", "--samples", "1"]) == 0
        found.append((run / "samples.jsonl").read_text())
    assert found[0] == found[1]
    written = json.loads((run / "model" / "generation_config.json").read_text())
    assert all(written[name] == value for name, value in settings.items())


class _Unsaved:
    """A tokenizer that cannot be saved."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def save_pretrained(self, *_: Any) -> None:
        raise NotImplementedError("no file form")


def test_what_cannot_be_saved_is_found_before_step_one(tiny_model_dir: Path, fixture_tokenizer: Any,
                                                       tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with pytest.raises(ModelError, match=r"the tokenizer of the model cannot be saved.*no file form"):
        save.check_saved_files(model, _Unsaved(fixture_tokenizer))


def test_weights_are_written_before_a_tokenizer_that_fails(tiny_model_dir: Path, fixture_tokenizer: Any,
                                                           tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with pytest.raises(OutputError, match=r"the model is written, but its tokenizer cannot be saved: no file form"):
        save.export(model, _Unsaved(fixture_tokenizer), tmp_path / "model", model.dtype, [3])
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_two_tables_under_a_tied_config(tiny_model_dir: Path, tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    """They learn apart, with a notice, and neither the result nor an exported checkpoint says that they are tied."""
    path = tmp_path / "model"
    shutil.copytree(tiny_model_dir, path)
    config = json.loads((path / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (path / "config.json").write_text(json.dumps(config))
    stored = load_file(path / "model.safetensors")
    stored["lm_head.weight"] = torch.flip(stored["model.embed_tokens.weight"], (0,)).contiguous()
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    run, data = tmp_path / "run", _rows(tmp_path / "rows.jsonl")
    assert main(["sft", "--model", str(path), "--data", str(data), "--output", str(run), "--max-steps", "2",
                 "--batch-size", "4", "--save-every", "1", "--learning-rate", "1e-3"]) == 0
    said = capsys.readouterr()
    assert "the files hold two different tables" in said.out + said.err
    assert main(["export", str(run), "--to", str(tmp_path / "one"), "--checkpoint", "step-00000001"]) == 0
    for result in (run / "model", tmp_path / "one"):
        assert json.loads((result / "config.json").read_text())["tie_word_embeddings"] is False
        found = load_file(result / "model.safetensors")
        for name in ("lm_head.weight", "model.embed_tokens.weight"):
            assert not torch.equal(found[name], stored[name]), name


def test_equal_tables_stay_tied(tiny_model_dir: Path, fixture_tokenizer: Any, tmp_path: Path) -> None:
    config = AutoModelForCausalLM.from_pretrained(tiny_model_dir).config
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config)
    save.export(model, fixture_tokenizer, tmp_path / "model", model.dtype, [3])
    assert json.loads((tmp_path / "model" / "config.json").read_text())["tie_word_embeddings"] is True


TIED = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64},
    "gpt_neo": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]],
                "max_position_embeddings": 64},
    "bloom": {"hidden_size": 16, "n_head": 2, "n_layer": 1},
    "gpt_neox": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
                 "max_position_embeddings": 64},
    "biogpt": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
               "max_position_embeddings": 64},
}


@pytest.mark.parametrize(("family", "end"), [("gpt2", "lm_head"), ("gpt2", "wte"), ("gpt_neo", "lm_head"),
                                             ("bloom", "word_embeddings"), ("gpt_neox", "embed_in"),
                                             ("biogpt", "output_projection")])
def test_both_ends_of_a_tied_table_learn(family: str, end: str, fixture_tokenizer: Any, tmp_path: Path) -> None:
    """Whichever end is named: peft itself ties them only under the names of Llama's modules."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**TIED[family], vocab_size=len(fixture_tokenizer), tie_word_embeddings=True,
                                    eos_token_id=fixture_tokenizer.eos_token_id)
    base = AutoModelForCausalLM.from_config(config)
    base.save_pretrained(tmp_path / "base")
    fixture_tokenizer.save_pretrained(tmp_path / "base")
    assert main(["sft", "--model", str(tmp_path / "base"), "--data", str(_rows(tmp_path / "rows.jsonl")), "--output",
                 str(tmp_path / "run"), "--max-steps", "2", "--batch-size", "4", "--learning-rate", "1e-2",
                 "--lora.rank", "2", "--lora.modules-to-save", end]) == 0
    start = base.get_input_embeddings().weight.detach().clone()
    learned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"),
                                        tmp_path / "run" / "model").merge_and_unload()
    moved = learned.get_input_embeddings().weight
    assert not torch.equal(moved, start)
    assert torch.equal(learned.get_output_embeddings().weight, moved)
