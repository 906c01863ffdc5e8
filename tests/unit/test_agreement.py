"""What the processes of a run compare before it starts: two of them, played by two descriptions or two threads."""

import json
import platform
import shutil
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from tropism.config import DPOOptions, KDOptions, KTOOptions, ScoringOptions
from tropism.distributed.agreement import Facts, differences
from tropism.model import content
from tropism.model.content import model_files
from tropism.model.source import ModelSource
from tropism.observe import manifest
from tropism.train.setup.agreement import facts_at_start, facts_of_options
from tropism.train.setup.python_objects import PythonObjects

Change = Callable[[Path, pytest.MonkeyPatch], dict[str, Any]]


def start(path: Path, options: Any = KTOOptions, objects: PythonObjects | None = None, **changes: Any) -> Facts:
    """What a process says before it loads anything."""
    settings = {"model": str(path), "data": "feedback.jsonl", "output": "run", **changes}
    found = options(**settings)
    named = {name: ModelSource.of(value) for name in ("model", "reference", "teacher")
             if (value := found.values.get(name)) not in (None, "live")}
    return facts_at_start(found.method, found, named, objects)


def copied(model: Path, folder: str) -> Path:
    return Path(shutil.copytree(model, model.parent / folder, dirs_exist_ok=True))


def edited(model: Path, name: str, change: Callable[[str], str] = lambda text: f"{text} ") -> Path:
    """Another directory with the same model, but for one file."""
    path = copied(model, f"edited-{name}")
    file = path / name
    file.write_text(change(file.read_text() if file.exists() else ""))
    return path


def one_weight_off(model: Path) -> Path:
    path = copied(model, "other-weights")
    weights = load_file(path / "model.safetensors")
    next(iter(weights.values())).view(-1)[-1] += 1e-3
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def an_adapter(model: Path, value: float) -> Path:
    path = model.parent / f"adapter-{value}"
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(model)}))
    save_file({"w": torch.full((2, 2), value)}, path / "adapter_model.safetensors")
    return path


def template(model: Path, text: str) -> str:
    path = model.parent / f"{len(text)}.jinja"
    path.write_text(text)
    return str(path)


OPTIONS = [
    ("learning-rate", {"learning_rate": 1e-5}, {"learning_rate": 2e-5}, "process 0 has 1e-5, process 1 has 2e-5"),
    ("learning-rate", {"learning_rate": 0.1234567}, {"learning_rate": 0.1234568},
     "process 0 has 0.1234567, process 1 has 0.1234568"),
    ("beta", {}, {"beta": 0.2}, "process 0 has none, process 1 has 0.2"),
    ("loss", {}, {"loss": "bco"}, "process 0 has kto, process 1 has bco"),
    ("microbatch-tokens", {}, {"microbatch_tokens": 64}, "process 0 has auto, process 1 has 64"),
    ("precision", {}, {"precision": "fp64"}, "process 0 has auto, process 1 has fp64"),
    ("layout", {}, {"layout": "padded"}, "process 0 has auto, process 1 has padded"),
    ("seed", {"seed": 1}, {"seed": 2}, "process 0 has 1, process 1 has 2"),
    ("max-steps", {"max_steps": 2}, {"max_steps": 3}, "process 0 has 2, process 1 has 3"),
    ("epochs", {}, {"epochs": 2}, "process 0 has 1, process 1 has 2"),
    ("batch-size", {}, {"batch_size": 16}, "process 0 has 32, process 1 has 16"),
    ("shuffle", {}, {"shuffle": False}, "process 0 has true, process 1 has false"),
    ("lora.rank", {"lora": {"rank": 4}}, {"lora": {"rank": 8}}, "process 0 has 4, process 1 has 8"),
    ("lora.targets", {"lora": {"rank": 4}}, {"lora": {"rank": 4, "targets": "q_proj"}},
     "process 0 has none, process 1 has q_proj"),
    ("parallel.tensor", {}, {"parallel": {"tensor": 2}}, "process 0 has 1, process 1 has 2"),
    ("resume", {}, {"resume": "auto"}, "process 0 has never, process 1 has auto"),
    ("output", {}, {"output": "run2"}, "run2"),
    ("reference", {}, {"reference": "live"}, "process 0 has none, process 1 has live"),
    ("eval-data", {}, {"eval_data": "more.jsonl"}, "process 0 has none, process 1 has more.jsonl"),
    ("log-every", {}, {"log_every": 2}, "process 0 has 1, process 1 has 2"),
    ("prefetch", {}, {"prefetch": 1}, "process 0 has 0, process 1 has 1"),
    ("trust-remote-code", {}, {"trust_remote_code": True}, "process 0 has false, process 1 has true"),
    ("chat-template-kwargs", {}, {"chat_template_kwargs": "a=1"}, "process 0 has none, process 1 has a=1")]


@pytest.mark.parametrize(("name", "one", "other", "sentence"), OPTIONS, ids=[entry[0] for entry in OPTIONS])
def test_an_option_that_differs_is_named_with_both_values(tiny_model_dir: Path, name: str, one: dict[str, Any],
                                                          other: dict[str, Any], sentence: str) -> None:
    found = differences([start(tiny_model_dir, **one), start(tiny_model_dir, **other)])
    assert len(found) == 1
    assert found[0].startswith(f"--{name}: process 0 has ")
    assert sentence in found[0]


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # 7 is no value of some
@pytest.mark.parametrize("name", sorted(KTOOptions.flat_fields().keys() | DPOOptions.flat_fields().keys()))
def test_every_option_is_compared_or_has_a_reason(tiny_model_dir: Path, name: str) -> None:
    """None is forgotten when options are added: the others are those of MAY_DIFFER."""
    options = (KTOOptions if name in KTOOptions.flat_fields() else DPOOptions)(
        model=str(tiny_model_dir), data="d", output="o")
    group, dot, inner = name.partition(".")
    kind = type(options).flat_fields()[name].annotation
    value: Any = {"chat_template": "plain", "reference": "live", "shuffle": False}.get(name, True if kind is bool else (
        7 if str not in get_args(kind) and kind is not str else "7"))
    if dot:
        changed = options.model_copy(update={group: getattr(options, group).model_copy(update={inner: value})})
    else:
        changed = options.model_copy(update={name: value})
    found = differences([facts_of_options(options), facts_of_options(changed)])
    by_content = {"model", "teacher", "data", "lora.adapter"}  # by the files that they name
    assert bool(found) == (name not in {"store", "store_limit", "workers", "track", "log_dir", "report"} | by_content)


FILES: list[tuple[str, Callable[[Path], dict[str, Any]], Callable[[Path], dict[str, Any]]]] = [
    ("--model: model.safetensors", lambda model: {}, lambda model: {"model": str(one_weight_off(model))}),
    ("--model: config.json", lambda model: {}, lambda model: {"model": str(edited(model, "config.json"))}),
    ("--model: tokenizer.json", lambda model: {}, lambda model: {"model": str(edited(model, "tokenizer.json"))}),
    ("--model: chat_template.jinja", lambda model: {},
     lambda model: {"model": str(edited(model, "chat_template.jinja"))}),
    ("--model: generation_config.json", lambda model: {},
     lambda model: {"model": str(edited(model, "generation_config.json"))}),
    ("--model: modeling_own.py", lambda model: {}, lambda model: {"model": str(edited(model, "modeling_own.py"))}),
    ("--chat-template", lambda model: {"chat_template": template(model, "{{ a }}")},
     lambda model: {"chat_template": template(model, "{{ a }} ")}),
    ("--chat-template", lambda model: {"chat_template": "chatml"}, lambda model: {"chat_template": "plain"}),
    ("--lora.adapter: adapter_model.safetensors", lambda model: {"lora": {"adapter": str(an_adapter(model, 1.0))}},
     lambda model: {"lora": {"adapter": str(an_adapter(model, 2.0))}}),
    ("--model: adapter: adapter_model.safetensors", lambda model: {"model": str(an_adapter(model, 1.0))},
     lambda model: {"model": str(an_adapter(model, 2.0))}),
    ("--reference", lambda model: {}, lambda model: {"reference": str(model)}),
    ("--reference: model.safetensors", lambda model: {"reference": str(model)},
     lambda model: {"reference": str(one_weight_off(model))}),
    ("--teacher: model.safetensors", lambda model: {"teacher": str(model)},
     lambda model: {"teacher": str(one_weight_off(model))})]


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


@pytest.mark.parametrize(("name", "one", "other"), FILES, ids=[entry[0] for entry in FILES])
def test_a_file_that_differs_is_named(model: Path, name: str, one: Any, other: Any) -> None:
    """By its content: to the last weight, and to the last space of a template."""
    kind = KDOptions if "teacher" in name else KTOOptions
    teacher = {"teacher": str(model)} if kind is KDOptions else {}
    found = differences([start(model, kind, **teacher | one(model)), start(model, kind, **teacher | other(model))])
    assert [line.partition(": process")[0] for line in found] == [name]


def test_the_same_model_may_be_elsewhere(model: Path) -> None:
    """On each machine in a directory of its own, with files that nobody reads."""
    other = copied(model, "elsewhere")
    for name in ("README.md", "trainer_state.json", "optimizer.pt", "training_args.bin"):
        (other / name).write_text("read by nobody")
    assert not differences([start(model), start(other)])
    assert not differences([start(model, store="a", workers=2, track="wandb"), start(model, store="b", workers=3)])
    assert differences([start(model, KDOptions, teacher=str(model), top_k=3, store="a"),
                        start(model, KDOptions, teacher=str(model), top_k=3, store="b")])


def test_a_file_that_one_process_lacks_is_named(model: Path) -> None:
    other = copied(model, "less")
    (other / "generation_config.json").unlink()
    found = differences([start(model), start(other)])
    assert [line.partition(" (")[0] for line in found] == [
        f"--model: generation_config.json: process 0 has {model / 'generation_config.json'}"]
    assert found[0].endswith("process 1 has none")


def test_large_weights_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and the last byte, and others between them; never more than the samples are read."""
    monkeypatch.setattr(content, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(content, "_PART_BYTES", 650)
    monkeypatch.setattr(content, "_SAMPLE_BYTES", 100)
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "pytorch_model.bin"

    def hash_with(place: int | None) -> str:
        data = bytearray(2000)
        if place is not None:
            data[place] = 1
        file.write_bytes(data)
        return next(one.hash for one in model_files(ModelSource(str(tmp_path))) if one.path == file)

    same = hash_with(None)
    assert all(hash_with(place) != same for place in (0, 99, 650, 749, 1300, 1999))
    assert hash_with(150) == same  # between samples
    monkeypatch.setattr(content, "_SAMPLES", 2)
    assert hash_with(1000) != hash_with(650) == hash_with(None)
    monkeypatch.setattr(content, "_WHOLE_BYTES", 10_000)
    assert hash_with(150) != hash_with(None)
    monkeypatch.setattr(content, "_PART_BYTES", 64)
    assert len({hash_with(place) for place in (None, 0, 63, 64, 150, 1999)}) == 6


def version_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    known = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.2.3" if name == "peft" else known(name))


MACHINES: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("version of peft", version_of_another),
    ("version of torch", lambda patch: patch.setattr(torch, "__version__", "2.0.0")),
    ("version of transformers", lambda patch: patch.setattr(sys.modules["transformers"], "__version__", "5.0.0")),
    ("code of tropism", lambda patch: patch.setattr("tropism.observe.manifest.code_hash", lambda: "0" * 32)),
    ("Python", lambda patch: patch.setattr(platform, "python_version", lambda: "3.10.0")),
    ("torch.get_float32_matmul_precision()",
     lambda patch: patch.setattr(torch, "get_float32_matmul_precision", lambda: "high")),
    ("torch.get_default_dtype()", lambda patch: patch.setattr(torch, "get_default_dtype", lambda: torch.float64)),
    ("torch.are_deterministic_algorithms_enabled()",
     lambda patch: patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)),
    ("device", lambda patch: patch.setattr(torch.cuda, "is_available", lambda: True)),
    ("NVIDIA_TF32_OVERRIDE", lambda patch: patch.setenv("NVIDIA_TF32_OVERRIDE", "0"))]


@pytest.mark.parametrize(("name", "change"), MACHINES, ids=[entry[0] for entry in MACHINES])
def test_a_version_or_setting_that_differs_is_named(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, name: str,
                                                    change: Callable[[pytest.MonkeyPatch], None]) -> None:
    ours = start(tiny_model_dir)
    change(monkeypatch)
    found = differences([ours, start(tiny_model_dir)])
    assert [line.partition(": process")[0] for line in found] == [name]


def test_what_belongs_to_a_process_is_not_compared(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = start(tiny_model_dir)
    for name, value in {"LOCAL_RANK": "1", "RANK": "1", "CUDA_VISIBLE_DEVICES": "1", "HOSTNAME": "other",
                        "TROPISM_STORE": "/elsewhere", "HF_HOME": "/elsewhere", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    assert not differences([ours, start(tiny_model_dir)])


def test_the_code_is_hashed_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hash_now() -> str:
        manifest.code_hash.cache_clear()
        return manifest.code_hash()

    try:
        assert hash_now() == hash_now()
        monkeypatch.setattr(manifest, "PACKAGE", tmp_path)
        (tmp_path / "inner").mkdir()
        (tmp_path / "inner" / "a.py").write_text("x = 1")
        first = hash_now()
        (tmp_path / "inner" / "a.py").rename(tmp_path / "a.py")
        second = hash_now()
        (tmp_path / "a.py").write_text("x = 2")
        assert len({first, second, hash_now()}) == 3
    finally:
        manifest.code_hash.cache_clear()


def test_commands_that_differ(tiny_model_dir: Path) -> None:
    """A run and an evaluation, a run and its resumption, two methods."""
    scoring = ScoringOptions(data="d")
    ours = start(tiny_model_dir)
    theirs = facts_at_start("evaluate", scoring, {"model": ModelSource.of(str(tiny_model_dir))})
    assert differences([ours, theirs])[0] == "command: process 0 has kto, process 1 has evaluate"
    found = differences([ours, start(tiny_model_dir, DPOOptions)])
    assert found[0] == "command: process 0 has kto, process 1 has dpo"
    assert len(found) < 8


def of(**optimizer: Any) -> PythonObjects:
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(2, 3)), torch.nn.Parameter(torch.randn(4))]
    kind = optimizer.pop("kind", torch.optim.AdamW)
    made = kind(weights[:optimizer.pop("count", 2)], **{"lr": 1e-3, **optimizer})
    return PythonObjects(optimizer=made, scheduler=torch.optim.lr_scheduler.StepLR(made, 5))


@pytest.mark.parametrize(("name", "change"), [
    ("optimizer: lr", {"lr": 2e-3}), ("optimizer: weight_decay", {"weight_decay": 0.5}), ("optimizer: betas",
    {"betas": (0.9, 0.95)}), ("optimizer: params", {"count": 1}), ("optimizer", {"kind": torch.optim.NAdam})])
def test_the_optimizer_of_a_python_caller_is_compared(tiny_model_dir: Path, name: str, change: dict[str, Any]) -> None:
    ours, theirs = (start(tiny_model_dir, objects=objects) for objects in (of(), of(**change)))
    found = differences([ours, theirs])
    assert found[0].startswith(f"{name}: process 0 has ")
    assert not differences([ours, start(tiny_model_dir, objects=of())])


def test_the_state_of_an_optimizer_and_a_scheduler_is_compared(tiny_model_dir: Path) -> None:
    other = of()
    for weight in other.optimizer.param_groups[0]["params"]:
        weight.grad = torch.ones_like(weight)
    other.optimizer.step()
    found = differences([start(tiny_model_dir, objects=of()), start(tiny_model_dir, objects=other)])
    assert [line.partition(": process")[0] for line in found] == ["optimizer: state"]
    other = of()
    other.scheduler.gamma = 0.5
    found = differences([start(tiny_model_dir, objects=of()), start(tiny_model_dir, objects=other)])
    assert found == ["scheduler: gamma: process 0 has 0.1, process 1 has 0.5"]
