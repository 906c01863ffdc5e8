"""Runs that train an adapter: from start to the directory that peft loads, stopped in between, and what is refused."""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from integration.conftest import records
from integration.resuming import answers, during, settings, start, stop_after, teacher_dir  # noqa: F401
from tropism.cli.app import main
from tropism.config import METHODS
from tropism.distributed.training_state import dcp
from tropism.errors import CheckpointError, ModelError, StoppedEarly, UsageError
from tropism.model import load
from tropism.model.source import ModelSource
from tropism.train.frozen import reference as references
from tropism.trainers import KTOTrainer, SFTTrainer

LORA = {"rank": 4}
IDS = torch.randint(5, 102, (1, 24), generator=torch.Generator().manual_seed(0))


def adapter(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def trained(start: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A run of KTO with an adapter, stopped never; seven steps."""
    return start("kto", tmp_path_factory.mktemp("trained") / "run", lora=LORA, save_every=3).directory


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model.eval()(IDS).logits


def merged(directory: Path) -> Any:
    return load.load_model(ModelSource.of(str(directory)), "fp32", torch.device("cpu"))


def test_the_result_loads_with_plain_peft(trained: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    """S1: in a fresh process, base and adapter by peft give the logits of ours; tokenizer and stop ids lie beside."""
    code = ("import sys, torch\nfrom transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig\n"
            "from peft import PeftModel\nbase, run, ids, out = sys.argv[1:]\n"
            "model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run).eval()\n"
            "tokenizer = AutoTokenizer.from_pretrained(run)\n"
            "assert tokenizer.chat_template and GenerationConfig.from_pretrained(run).eos_token_id is not None\n"
            "ids = torch.load(ids)\n"
            "with torch.no_grad():\n"
            "    torch.save([model(ids).logits, AutoModelForCausalLM.from_pretrained(run).eval()(ids).logits], out)\n")
    torch.save(IDS, tmp_path / "ids.pt")
    done = subprocess.run([sys.executable, "-c", code, str(tiny_model_dir), str(trained / "model"),
                           str(tmp_path / "ids.pt"), str(tmp_path / "out.pt")], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr
    ours = logits_of(merged(trained / "model"))
    for theirs in torch.load(tmp_path / "out.pt"):
        assert torch.allclose(theirs, ours, atol=1e-5)
    assert not torch.allclose(ours, logits_of(AutoModelForCausalLM.from_pretrained(tiny_model_dir)), atol=1e-2)
    config = json.loads((trained / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_model_dir)
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.0)


def test_every_adapter_weight_has_learned_and_is_kept(trained: Path, tiny_model_dir: Path) -> None:
    """S1: a pair of matrices for each linear layer but the head; each row of each B is away from 0."""
    from tropism.model.adapters.targets import linear_names

    state = adapter(trained / "model")
    linear = linear_names(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    assert state.keys() == {f"base_model.model.{name}.lora_{side}.weight" for name in linear for side in "AB"}
    for name, weight in state.items():
        assert weight.dtype == torch.float32
        if "lora_B" in name:
            assert bool((weight != 0).any(dim=1).all()), name


def test_the_run_directory_says_what_learned(trained: Path, tiny_model_dir: Path) -> None:
    total = sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(tiny_model_dir).parameters())
    facts = json.loads((trained / "manifest.json").read_text())["adapter"]
    learning = sum(weight.numel() for weight in adapter(trained / "model").values())
    assert facts == {"rank": 4, "modules": len(adapter(trained / "model")) // 2, "kinds": 7, "whole": 0, "experts": 0,
                     "learning": learning, "total": total + learning}


def test_checkpoints_hold_what_learns_only(trained: Path) -> None:
    """The adapter, two moments of it and a count; the base comes from its source again."""
    newest = max((trained / "checkpoints").glob("step-*"))
    tensors = dcp.FileSystemReader(newest / "state").read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in tensors)
    learning = [weight.numel() for weight in adapter(trained / "model").values()]
    assert sum(math.prod(entry.size) for entry in tensors.values()) == 3 * sum(learning) + len(learning)


@pytest.mark.parametrize("case", [{}, {"dora": True, "modules_to_save": "lm_head"}], ids=["lora", "dora"])
def test_a_stopped_run_equals_the_straight_one(start: Callable[..., Any], stop_after: Callable[..., None],  # noqa: F811
                                               during: Callable[..., None], tmp_path: Path,  # noqa: F811
                                               case: dict[str, Any]) -> None:
    """C1, R2: weights and records to the bit; every reference score is the one from before the stop."""
    lora = {**LORA, **case}
    straight = start("kto", tmp_path / "straight", lora=lora, store=tmp_path / "one")
    stop_after(4)
    with pytest.raises(StoppedEarly):
        start("kto", tmp_path / "stopped", lora=lora, store=tmp_path / "two")
    during()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references, "_score_pack", lambda *args: pytest.fail("scored again"))
        resumed = start("kto", tmp_path / "stopped", lora=lora, store=tmp_path / "two", resume="auto")
    one, other = adapter(straight.model), adapter(resumed.model)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    drop = {"step_time", "tokens_per_second", "memory/peak_gib", "tokens/computed"}
    assert [{k: v for k, v in line.items() if k not in drop} for line in records(straight)] == [
        {k: v for k, v in line.items() if k not in drop} for line in records(resumed)]


def test_scores_are_those_of_the_base(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """R2: a fresh adapter's reference is the base, so that runs with and without one, or another seed, share it."""
    full = train("dpo", max_steps=1)
    monkeypatch.setattr(references, "_score_pack", lambda *args: pytest.fail("scored again"))
    runs = [train("dpo", max_steps=1, lora=lora) for lora in (LORA, {"rank": 2, "dora": True}, {**LORA, "rslora": True},
                                                               {**LORA, "modules_to_save": "embed_tokens"})]
    facts = [json.loads((run.directory / "manifest.json").read_text()) for run in (full, *runs)]
    assert len({fact["reference"] for fact in facts}) == 1
    assert all(fact["policy"] == fact["reference"] for fact in facts)


def test_scores_in_bfloat16_are_shared_too(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Holding the frozen weights in bfloat16 changes no score and no fingerprint."""
    full = train("dpo", max_steps=1, precision="bf16")
    monkeypatch.setattr(references, "_score_pack", lambda *args: pytest.fail("scored again"))
    ours = train("dpo", max_steps=1, precision="bf16", lora=LORA)
    assert records(full)[0]["loss"] == pytest.approx(records(ours)[0]["loss"], abs=1e-6)


@pytest.mark.some(3)
@pytest.mark.parametrize("method", ["kto", "dpo"])
@pytest.mark.parametrize("changes", [{"lora": LORA}, {"lora": {**LORA, "dora": True}},
                                     {"lora": {**LORA, "rslora": True}}, {"lora": "from"}, {"model": "from"},
                                     {"lora": LORA, "reference": "live"}, {"lora": "from", "reference": "live"},
                                     {"lora": LORA, "precision": "fp64"}],
                         ids=["lora", "dora", "rslora", "from", "model", "live", "from-live", "fp64"])
def test_margins_begin_at_0(train: Callable[..., Any], trained: Path, method: str, changes: dict[str, Any],
                            capsys: pytest.CaptureFixture[str]) -> None:
    """R1, R2: policy and reference agree before step 1, also from an adapter that has learned; and part after it."""
    changes = {key: str(trained / "model") if key == "model" else
               {"adapter": str(trained / "model")} if (key, value) == ("lora", "from") else value
               for key, value in changes.items()}
    result = train(method, max_steps=2, strict=True, **changes)
    first, second = records(result)
    assert first["rewards/margins"] == pytest.approx(0.0, abs=1e-4)
    assert first["loss"] == pytest.approx(0.5 if method == "kto" else 0.6931471806, abs=1e-6)
    assert second["rewards/margins"] != 0
    said = capsys.readouterr().out
    assert "policy and reference agree" in said
    assert ("with this adapter before step 1" in said) == (str(trained / "model") in said)


def test_live_scores_equal_the_stored_ones(train: Callable[..., Any], trained: Path) -> None:
    """R3, R4: the adapter switched off is the base to the end, also beside a module that learns whole."""
    for lora in ({**LORA, "modules_to_save": "lm_head"}, {"adapter": str(trained / "model")}):
        stored, live = train("dpo", max_steps=4, lora=lora), train("dpo", max_steps=4, lora=lora, reference="live")
        for one, other in zip(records(stored), records(live), strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)


def test_the_seed_decides_where_it_begins(train: Callable[..., Any]) -> None:
    one, same, other = (adapter(train("dpo", max_steps=1, learning_rate=0.0, lora=LORA, seed=seed).model)
                        for seed in (0, 0, 1))
    for name, weight in one.items():
        assert torch.equal(weight, same[name])
        assert torch.equal(weight, other[name]) == ("lora_B" in name)


def test_config_yaml_repeats_the_run(train: Callable[..., Any], tmp_path: Path) -> None:
    """The rate that adapters get is written down, and so is the adapter's own."""
    result = train("kto", max_steps=3, lora=LORA)
    config = result.directory / "config.yaml"
    assert main(["train", str(config), "--output", str(tmp_path / "again")]) == 0
    one, other = adapter(result.model), adapter(tmp_path / "again" / "model")
    assert all(torch.equal(one[name], other[name]) for name in one)
    for method, options in METHODS.items():
        given = {"model": "m", "data": "d", "output": "o", **({"teacher": "t"} if method == "kd" else {})}
        assert options(**given, lora=LORA).learning_rate == 1e-4
        assert options(**given, lora=LORA, learning_rate=3e-4).learning_rate == 3e-4
        assert options(**given).learning_rate != 1e-4
        assert options(**given, lora=LORA).dump()["learning_rate"] == 1e-4


def test_from_the_command_line(tiny_model_dir: Path, feedback: Path, trained: Path, tmp_path: Path,
                               capsys: pytest.CaptureFixture[str]) -> None:
    """Flags, an adapter as the model, and a run directory with an adapter in evaluate and score."""
    run = tmp_path / "run"
    common = ["--data", str(feedback), "--store", str(tmp_path / "store"), "--max-steps", "2", "--samples", "0"]
    assert main(["kto", "--model", str(tiny_model_dir), "--output", str(run), "--lora.rank", "2", "--lora.targets",
                 "q_proj,v_proj", *common]) == 0
    assert "adapter: rank 2 on 4 modules (2 kinds): " in capsys.readouterr().out
    assert main(["kto", "--model", str(run / "model"), "--output", str(tmp_path / "more"), *common]) == 0
    options = yaml.safe_load((tmp_path / "more" / "config.yaml").read_text())
    assert (options["model"], options["learning_rate"]) == (str(run / "model"), 1e-4)
    assert main(["evaluate", str(trained), "--data", str(feedback), "--reference", str(tiny_model_dir), "--json",
                 str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())["metrics"]
    assert figures["rewards/margins"] > 0
    assert main(["score", str(trained), "--data", str(feedback), "--output", str(tmp_path / "scores.jsonl")]) == 0
    assert main(["inspect", str(feedback), "--model", str(trained / "model"), "--rows", "0"]) == 0
    assert main(["verify", str(trained)]) == 0
    assert main(["kto", "--model", str(tiny_model_dir), "--output", str(tmp_path / "no"), "--lora.rank", "2",
                 "--lora.targets", "qproj", *common]) == 2
    assert "q_proj?" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_an_adapter_as_reference_or_teacher(train: Callable[..., Any], start: Callable[..., Any],  # noqa: F811
                                            trained: Path, tmp_path: Path) -> None:
    """Merged into its base: the figures are those of the merged model's directory."""
    whole = tmp_path / "whole"
    merged(trained / "model").save_pretrained(whole)
    load.load_tokenizer(ModelSource.of(str(trained / "model"))).save_pretrained(whole)
    one, other = (records(train("dpo", max_steps=1, reference=str(path))) for path in (trained / "model", whole))
    assert one[0]["loss"] == pytest.approx(other[0]["loss"], abs=1e-6)
    one, other = (records(start("kd", tmp_path / f"kd-{path.name}", max_steps=1, teacher=path, lora=LORA))
                  for path in (trained / "model", whole))
    assert one[0]["kd/divergence"] == pytest.approx(other[0]["kd/divergence"], abs=1e-6)


def test_the_last_lines_say_how_to_merge(tiny_model_dir: Path, feedback: Path, tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    """The command works as printed; a run without an adapter has no such line."""
    common = ["kto", "--model", str(tiny_model_dir), "--data", str(feedback), "--store", str(tmp_path / "store"),
              "--max-steps", "1", "--samples", "0", "--output"]
    assert main([*common, str(tmp_path / "my run"), "--lora.rank", "2"]) == 0
    hint = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  tropism export "))
    assert hint.endswith(" --merge")
    command = shlex.split(hint.partition("tropism ")[2].replace("DIR", shlex.quote(str(tmp_path / "served"))))
    assert main(command) == 0
    assert f"adapter merged into {tiny_model_dir}; the outputs before and after agree" in capsys.readouterr().out
    assert (tmp_path / "served" / "model.safetensors").exists()
    assert main([*common, str(tmp_path / "plain")]) == 0
    assert "adapter" not in capsys.readouterr().out


def test_a_module_from_python(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> None:
    """It is wrapped in place, its own weights stay what they were to the bit, and it holds the result."""
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    common = {"train_dataset": str(feedback), "store": str(tmp_path / "store"), "max_steps": 3, "samples": 0,
              "quiet": True}
    result = KTOTrainer(module, output=str(tmp_path / "run"), lora_rank=4, **common).fit()
    after = {name.replace(".base_layer", ""): weight for name, weight in module.state_dict().items()
             if "lora_" not in name}
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.allclose(logits_of(module), logits_of(merged(result.model)), atol=1e-5)
    for number, options in enumerate(({"lora": {"rank": 4}}, {"lora.rank": 4})):
        named = KTOTrainer(str(tiny_model_dir), output=str(tmp_path / f"named{number}"), **options, **common).fit()
        one, other = adapter(named.model), adapter(result.model)
        assert all(torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(UsageError, match="already has an adapter"):
        KTOTrainer(module, output=str(tmp_path / "again"), lora_rank=4, **common).fit()


def test_a_peft_model_from_python(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> None:
    """Its adapter is trained as it is, under its own name; other weights that would learn are refused."""
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(base, config, adapter_name="mine")
    common = {"train_dataset": str(feedback), "store": str(tmp_path / "store"), "max_steps": 3, "samples": 0,
              "quiet": True}
    trainer = KTOTrainer(model, output=str(tmp_path / "run"), strict=True, **common)
    assert trainer.options.learning_rate == 1e-4
    result = trainer.fit()
    assert len(adapter(result.model)) == 8
    assert torch.allclose(logits_of(model), logits_of(merged(result.model)), atol=1e-5)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    KTOTrainer(model, output=str(tmp_path / "own"), optimizer=optimizer, **common).fit()
    base.model.norm.weight.requires_grad_(True)
    with pytest.raises(ModelError, match=r"1 trainable tensor outside the adapter \(model.norm.weight"):
        KTOTrainer(model, output=str(tmp_path / "more"), **common).fit()


def test_export_dtype_and_models_of_checkpoints(start: Callable[..., Any], tmp_path: Path,  # noqa: F811
                                                capsys: pytest.CaptureFixture[str]) -> None:
    """S1: the adapter's file has the dtype that was asked for, in checkpoints too."""
    result = start("sft", tmp_path / "run", lora=LORA, export_dtype="bfloat16", save_every=3, checkpoint_model=True)
    assert "of the changed weights" in capsys.readouterr().out
    for directory in (result.model, max((tmp_path / "run" / "checkpoints").glob("step-*")) / "model"):
        assert {weight.dtype for weight in adapter(directory).values()} == {torch.bfloat16}
        merged(directory)


def test_a_run_that_was_done_gives_its_adapter(start: Callable[..., Any], trained: Path,  # noqa: F811
                                               settings: Callable[..., dict[str, Any]],  # noqa: F811
                                               tiny_model_dir: Path, tmp_path: Path, feedback: Path) -> None:
    """In Python a module that goes on with a run that is done gets what it ended with."""
    common = {"train_dataset": str(feedback), "store": str(tmp_path / "store"), "max_steps": 2, "samples": 0,
              "quiet": True, "lora": LORA, "output": str(tmp_path / "run")}
    result = KTOTrainer(AutoModelForCausalLM.from_pretrained(tiny_model_dir), **common).fit()
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    KTOTrainer(module, **common).fit(resume=True)
    assert torch.allclose(logits_of(module), logits_of(merged(result.model)), atol=1e-5)
    with pytest.raises(CheckpointError, match=r"--lora\.rank \(was 4, now 5\)"):
        start("kto", trained, lora={"rank": 5}, save_every=3, resume="auto")


def test_what_is_refused(tiny_model_dir: Path, answers: Path, trained: Path, tmp_path: Path,  # noqa: F811
                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, with what to do."""

    def refused(error: type[Exception], match: str, model: Any = tiny_model_dir, **lora: Any) -> None:
        with pytest.raises(error, match=match):
            SFTTrainer(str(model), train_dataset=str(answers), output=str(tmp_path / "run"), lora=lora).fit()
        assert not (tmp_path / "run").exists()

    refused(UsageError, r"adapter_config\.json not found", adapter=str(tmp_path))
    refused(UsageError, "--lora.rank .*--lora.adapter", adapter=str(trained / "model"), rank=2)
    refused(UsageError, "is an adapter, which is trained further", model=trained / "model", rank=2)
    refused(UsageError, "--lora.alpha .*--lora.rank", alpha=2.0)
    refused(UsageError, r"\bq_proj\?", rank=2, targets="q_prj")
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with pytest.raises(UsageError, match="optimizer cannot hold the weights of a new adapter"):
        SFTTrainer(module, train_dataset=str(answers), output=str(tmp_path / "run"), lora_rank=2, quiet=True,
                   optimizer=torch.optim.SGD(module.parameters(), lr=0.1)).fit()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(ModelError, r"bitsandbytes.*pip install 'tropism\[quant\]'", rank=2, quantize="nf4")


@pytest.mark.parametrize(("kind", "more"), [("nf4", {}), ("int8", {"dora": True, "modules_to_save": "lm_head"})],
                         ids=["nf4", "int8-dora"])
def test_quantized_weights(start: Callable[..., Any], stop_after: Callable[..., None],  # noqa: F811
                           during: Callable[..., None], tmp_path: Path, kind: str,  # noqa: F811
                           more: dict[str, Any]) -> None:
    """QLoRA: the first margins are 0, a stopped run equals the straight one, and the file is an ordinary adapter."""
    pytest.importorskip("bitsandbytes")
    lora = {**LORA, "quantize": kind, **more}
    straight = start("dpo", tmp_path / "straight", lora=lora, strict=True)
    stop_after(4)
    with pytest.raises(StoppedEarly):
        start("dpo", tmp_path / "stopped", lora=lora)
    during()
    resumed = start("dpo", tmp_path / "stopped", lora=lora, resume="auto")
    one, other = adapter(straight.model), adapter(resumed.model)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(bool(weight.any()) for weight in one.values())
    merged(straight.model)
