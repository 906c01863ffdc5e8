"""`tropism export --push` against a hub on loopback: what arrives, what is refused, what a drop leaves."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

import fake_hub
from exporting import filled_run
from tropism.cli.app import main
from tropism.commands.export import export, weights
from tropism.errors import OutputError, OutputExistsError, UsageError
from tropism.observe.console import Voice


@pytest.fixture
def run(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A run that is done, on a base and data of the Hub, with held-out rows."""
    path = tmp_path / "runs" / "first"
    shutil.copytree(tiny_model_dir, path / "model")
    filled_run(path, Path("some/base"), data="some/rows:2,/home/someone/secret.jsonl", eval_data=None)
    (path / "audit.json").write_text(json.dumps({"source": "some/rows", "split": {"train": 90, "eval": 30}}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(
        {"split": "eval", "step": step, "rewards/auc": auc, "rewards/auc_low": auc - 0.1, "rewards/auc_high": auc + 0.1}
    ) + "\n" for step, auc in ((0, 0.5), (4, 0.75))))
    return path


@pytest.fixture
def adapter_run(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A run that is done, of an adapter on a local base."""
    from peft import LoraConfig, get_peft_model

    path = tmp_path / "runs" / "adapter"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), LoraConfig(
        r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.save_pretrained(path / "model")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(path / "model")
    return filled_run(path, tiny_model_dir, lora={"rank": 2, "alpha": 8.0, "targets": "q_proj", "adapter": None})


def weight_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows when an export reads weights."""
    found: list[int] = []
    monkeypatch.setattr("tropism.commands.export.run.of_result", lambda *given: (
        found.append(1), weights.of_result(*given))[1])
    return found


def test_a_push_arrives(hub: fake_hub.Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file of the directory and nothing else, privately, with a card that the Hub accepts, and no path in it."""
    assert main(["export", str(run), "--to", str(tmp_path / "m"), "--push", "me/model", "--private"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"uploaded to {hub.endpoint}/me/model"
    repo = hub.repos["model", "me/model"]
    assert repo.private
    there = {file.name: file.read_bytes() for file in (tmp_path / "m").iterdir()}
    assert {name: content for name, content in repo.files.items() if name != ".gitattributes"} == there
    for name, content in there.items():
        assert not any(word in content for word in (str(tmp_path).encode(), b"/home/")), name
    card = ModelCard.load(tmp_path / "m" / "README.md")
    card.validate()
    assert (card.data.base_model, card.data.datasets, card.data.library_name) == (
        "some/base", ["some/rows"], "transformers")
    assert (card.data.base_model_relation, card.data.license) == ("finetune", None)
    assert card.data.tags == ["tropism", "kto"]
    result = card.data.eval_results[0]
    assert (result.metric_type, result.metric_value, result.metric_args) == (
        "roc_auc", 0.75, {"rows": 30, "interval_95": [0.65, 0.85]})
    assert '"me/model"' in card.text
    assert "\nvllm serve me/model --served-model-name=me/model " in card.text
    assert "in the directory that contains" not in card.text
    assert "secret.jsonl" in result.dataset_name

    # The same command again redoes nothing; an edited card is pushed.
    before = (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "m" / "README.md").write_text("---\nlicense: mit\n---\nmine\n")
    assert export(run, tmp_path / "m", push="me/model", voice=Voice(loud=False)).url == f"{hub.endpoint}/me/model"
    assert (tmp_path / "m" / "model.safetensors").stat().st_mtime_ns == before
    assert hub.repos["model", "me/model"].files["README.md"].endswith(b"mine\n")
    # In more files, those of before are gone, and what an earlier export wrote for other servers.
    hub.add("me/model", {**repo.files, "model-q8_0.gguf": b"old", "Modelfile": b"old"})
    export(run, tmp_path / "parts", push="me/model", max_shard_size="20KB", voice=Voice(loud=False))
    assert not {"model.safetensors", "model-q8_0.gguf", "Modelfile"} & repo.files.keys()
    assert "model.safetensors.index.json" in repo.files


@pytest.mark.parametrize("request_", ["PUT /lfs", "POST /api/models/me/model/preupload"])
def test_a_dropped_connection_is_retried(hub: fake_hub.Hub, run: Path, tmp_path: Path, request_: str) -> None:
    hub.drop(request_, 2)
    export(run, tmp_path / "m", push="me/model", voice=Voice(loud=False))
    assert hub.drops == [(request_, 0)]
    assert hub.repos["model", "me/model"].files.keys() > {"model.safetensors", "export.json"}


@pytest.mark.parametrize("request_", ["PUT /lfs", "POST /api/models/me/model/commit", "POST /api/repos/create"])
def test_a_push_that_fails_leaves_the_export_and_tells_the_command(
        hub: fake_hub.Hub, run: Path, tmp_path: Path, request_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.drop(request_, 99)
    with pytest.raises(OutputError, match=r"is complete. To upload it again, run: ") as failed:
        export(run, tmp_path / "m", push="me/model", voice=Voice(loud=False))
    command = str(failed.value).partition("run: tropism ")[2].split()
    assert command == ["export", str(run), "--to", str(tmp_path / "m"), "--push", "me/model"]
    hub.drops.clear()
    reads = weight_reads(monkeypatch)
    assert main(command) == 0
    assert not reads
    assert "model.safetensors" in hub.repos["model", "me/model"].files


def test_what_is_refused_before_weights_are_read(hub: fake_hub.Hub, run: Path, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    reads = weight_reads(monkeypatch)
    quiet: dict[str, Any] = {"voice": Voice(loud=False)}
    to = tmp_path / "m"
    for name in ("model", "a/b/c", "me/../x", "", "me/a b", "https://huggingface.co/me/x", "me/x.git"):
        with pytest.raises(UsageError, match="not a valid repository name"):
            export(run, to, push=name, **quiet)
    with pytest.raises(UsageError, match="--private has no effect without --push"):
        export(run, to, private=True, **quiet)
    hub.add("me/other", {"README.md": b"x", "pytorch_model.bin": b"y"})
    with pytest.raises(OutputExistsError, match=r"not an export of this run, such as README.md"):
        export(run, to, push="me/other", **quiet)
    hub.add("me/run", {"export.json": json.dumps({"run": "first", "fingerprints": {"data": "0"}}).encode()})
    with pytest.raises(OutputExistsError, match="not an export of this run"):
        export(run, to, push="me/run", **quiet)
    hub.add("me/bad", {"export.json": b"[" * 10_000})
    with pytest.raises(OutputExistsError, match="not an export of this run"):
        export(run, to, push="me/bad", **quiet)
    hub.add("me/empty", {".gitattributes": b""})
    with pytest.raises(UsageError, match="exists and is public"):
        export(run, to, push="me/empty", private=True, **quiet)
    hub.role = "read"
    with pytest.raises(UsageError, match="the token may only read"):
        export(run, to, push="me/new", **quiet)
    hub.drop("GET /api/whoami", 1)
    with pytest.raises(OutputError, match=r"the repository cannot be looked up: .*Nothing was written"):
        export(run, to, push="me/new", **quiet)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(UsageError, match="does not accept the token"):
        export(run, to, push="me/new", **quiet)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="no token for the Hub was found"):
        export(run, to, push="me/new", **quiet)
    assert not reads
    assert not to.exists()
    assert ("model", "me/new") not in hub.repos


def test_a_directory_of_another_export_is_not_pushed(hub: fake_hub.Hub, run: Path, tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"voice": Voice(loud=False), "push": "me/model"}
    to = tmp_path / "m"
    export(run, to, voice=Voice(loud=False))
    with pytest.raises(OutputExistsError, match="is not empty"):
        export(run, to, voice=Voice(loud=False))
    with pytest.raises(OutputExistsError, match="holds another export: its dtype is float32, not bfloat16"):
        export(run, to, dtype="bf16", **quiet)
    other = shutil.copytree(run, tmp_path / "runs" / "second")
    with pytest.raises(OutputExistsError, match="its run is first, not second"):
        export(other, to, **quiet)
    facts = json.loads((to / "export.json").read_text())
    (to / "config.json").write_text((to / "config.json").read_text() + " ")
    with pytest.raises(OutputExistsError, match=r"the export has changed: config.json"):
        export(run, to, **quiet)
    for broken in ("", "[]", "{}", json.dumps({**facts, "files": {"../x": {}}}), json.dumps({**facts, "files": 3})):
        (to / "export.json").write_text(broken)
        with pytest.raises(OutputExistsError):
            export(run, to, **quiet)
    assert ("model", "me/model") not in hub.repos


def test_an_adapter_is_pushed_with_a_base_that_others_have(hub: fake_hub.Hub, adapter_run: Path, tiny_model_dir: Path,
                                                           tmp_path: Path) -> None:
    quiet: dict[str, Any] = {"voice": Voice(loud=False), "push": "me/adapter"}
    with pytest.raises(UsageError, match=r"base is a local directory .*--base owner/name, or add --merge"):
        export(adapter_run, tmp_path / "a", **quiet)
    assert not hub.repos
    export(adapter_run, tmp_path / "local", voice=Voice(loud=False))
    with pytest.raises(UsageError, match="base is a local directory"):
        export(adapter_run, tmp_path / "local", **quiet)
    hub.add("some/base", {file.name: file.read_bytes() for file in tiny_model_dir.iterdir()})
    export(adapter_run, tmp_path / "a", base="some/base", **quiet)
    files = hub.repos["model", "me/adapter"].files
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "some/base"
    card = ModelCard(files["README.md"].decode())
    card.validate()
    assert (card.data.base_model, card.data.base_model_relation, card.data.library_name) == (
        "some/base", "adapter", "peft")
    assert not any(str(tmp_path).encode() in content or str(tiny_model_dir).encode() in content
                   for content in files.values())


@pytest.mark.parametrize("name", ["a\n---\nlicense: mit", "x: y", "'\"", "# a", "\x1b[31m", "- [", "{{ 1 }}", "é" * 90])
def test_names_in_metadata_are_data(run: Path, tmp_path: Path, name: str) -> None:
    """Whatever data, method and directory are called, the keys are ours, and the Hub's rules hold."""
    filled_run(run, Path("some/base"), data=f"{name}.jsonl", method="kto")
    place = tmp_path / name.replace("/", "_")
    export(run, place, voice=Voice(loud=False))
    card = (place / "README.md").read_text(encoding="utf-8")
    assert fake_hub.invalid(card) == []
    values = yaml.safe_load(card.split("\n---\n")[0].removeprefix("---\n"))
    assert values.keys() == {"base_model", "base_model_relation", "library_name", "pipeline_tag", "tags", "model-index"}
    assert values["base_model"] == "some/base"
