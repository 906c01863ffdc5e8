"""Models of a hub on loopback at a revision: what a run reads, records and reads again when its branch has moved."""

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load, load_file, save
from transformers import AutoModelForCausalLM

import fake_hub
from tropism.cli.app import main
from tropism.errors import ModelError
from tropism.model.content import pinned
from tropism.model.load import load_config, load_model, load_tokenizer
from tropism.model.names import find_model, split_revision
from tropism.model.source import ModelSource, public_name


def moved(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of a model whose weights are others."""
    weights = {name: weight * 1.5 for name, weight in load(files["model.safetensors"]).items()}
    return {**files, "model.safetensors": save(weights, metadata={"format": "pt"})}


@pytest.mark.parametrize(("name", "split"), [
    ("a/b@main", ("a/b", "main")), ("a/b@refs/pr/1", ("a/b", "refs/pr/1")), ("a/b", ("a/b", None)),
    ("a/b@", ("a/b@", None)), ("a/b@-x", ("a/b@-x", None)), ("/a/b@c", ("/a/b@c", None)), ("a@b", ("a@b", None))])
def test_names_with_a_revision(name: str, split: tuple[str, str | None]) -> None:
    assert split_revision(name) == split


def test_a_directory_whose_name_has_the_sign_is_local(tiny_model_dir: Path, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b@c").symlink_to(tiny_model_dir)
    monkeypatch.chdir(tmp_path)
    assert ModelSource.of("a/b@c").revision is None
    for name in ("./a/x@y", "/a/x@y", "x@y", "a/b/c@d"):
        with pytest.raises(ModelError, match="not a valid Hub id"):
            find_model(name)
    assert public_name("some/model@refs/pr/1") == "some/model@refs/pr/1"


def test_a_model_is_read_at_its_revision(hub: fake_hub.Hub, tiny_model_dir: Path) -> None:
    """Config, tokenizer and weights of a branch, a commit, or the main branch."""
    files = {file.name: file.read_bytes() for file in tiny_model_dir.iterdir()}
    old = hub.add("some/model", files, branch="v1")
    config = json.loads(files["config.json"]) | {"bos_token_id": 7}
    new = hub.add("some/model", {**moved(files), "config.json": json.dumps(config).encode()})
    first = load(files["model.safetensors"])
    for name, commit, factor in (("some/model@v1", old, 1), (f"some/model@{old}", old, 1), ("some/model", new, 1.5)):
        source = ModelSource.of(name)
        assert pinned(source).absolute == f"some/model@{commit}"
        assert (load_config(source).bos_token_id == 7) == (commit == new)
        load_tokenizer(source)
        found = load_model(source, "fp32", torch.device("cpu")).state_dict()
        assert all(torch.equal(found[weight], factor * first[weight]) for weight in first)
    with pytest.raises(ModelError, match=r"some/model: directory not found, and the model config could not be loaded"):
        load_config(ModelSource.of("some/model@v9"))


def test_a_run_keeps_the_commit_when_the_branch_moves(hub: fake_hub.Hub, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Policy, data and base of the adapter: recorded at the start, read again by resume and export."""
    files = {file.name: file.read_bytes() for file in tiny_model_dir.iterdir()}
    base = hub.add("some/model", files)
    rows = [{"prompt": f"q{number}", "completion": f" a{number % 3}", "label": number % 2 == 0} for number in range(12)]
    data = hub.add("some/rows", {"train.jsonl": "\n".join(map(json.dumps, rows)).encode()}, "dataset")
    run = tmp_path / "run"
    command = ["--output", str(run), "--store", str(tmp_path / "store"), "--no-report"]
    assert main(["kto", "--model", "some/model", "--data", "some/rows", "--lora.rank", "2", "--batch-size", "4",
                 "--max-steps", "2", "--save-every", "1", *command]) == 0
    options = yaml.safe_load((run / "config.yaml").read_text())
    assert (options["model"], options["data"]) == (f"some/model@{base}", f"some/rows@{data}")
    assert json.loads((run / "manifest.json").read_text())["model"] == f"some/model@{base}"
    assert json.loads((run / "audit.json").read_text())["commits"] == {"some/rows": data}
    config = json.loads((run / "model" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/model", base)
    assert ModelSource.of(str(run / "model")).base.absolute == f"some/model@{base}"

    hub.add("some/model", moved(files))
    hub.add("some/rows", {"train.jsonl": json.dumps(rows[0]).encode()}, "dataset")
    assert main(["resume", str(run), "--max-steps", "3"]) == 0
    assert json.loads((run / "manifest.json").read_text())["steps"] == 3
    assert main(["export", str(run), "--to", str(tmp_path / "adapter"), "--push", "me/adapter"]) == 0
    pushed = hub.repos["model", "me/adapter"].files
    config = json.loads(pushed["adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/model", base)
    card = ModelCard(pushed["README.md"].decode())
    card.validate()
    assert (card.data.base_model, card.data.datasets) == ("some/model", ["some/rows"])
    assert f"vllm serve some/model --revision {base} --tokenizer-revision main --enable-lora" in card.text
    assert re.search(rf"commit of some/rows \| {data} ", card.text)
    assert main(["export", str(run), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    there = load_file(tmp_path / "merged" / "model.safetensors")
    first = load(files["model.safetensors"])
    assert torch.equal(there["model.embed_tokens.weight"], first["model.embed_tokens.weight"])
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
