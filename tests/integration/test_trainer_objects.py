"""Objects that Python code for other trainers passes: wrapped modules, optimizers, datasets of splits, LoraConfig."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import StepLR
from transformers import AutoModelForCausalLM, LlamaModel

from integration.conftest import records, weights
from integration.test_trainers import equal, rows_in, trees_of
from tropism import DPOTrainer, KTOTrainer, unwrap
from tropism.errors import DataError, ModelError, TropismError, UsageError


def _named(value: Any) -> str:
    """The id of a parameter, the same in every process of the suite."""
    return "" if callable(value) or " at 0x" in str(value) else str(value)


class Actor(nn.Module):
    """A module that holds a model, as OpenRLHF's does."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model


# --- modules ----------------------------------------------------------------------------------------------------------


def test_a_wrapped_module_is_trained_in_place(small: Any, module: Any, tiny_model_dir: Path) -> None:
    """With the optimizer of the wrapper, and a reference in a wrapper too; the wrapper holds the result."""
    actor = Actor(nn.DataParallel(module))
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)
    other = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    wrapped = small("dpo", actor, optimizer=optimizer, scheduler=StepLR(optimizer, 2),
                    ref_model=Actor(AutoModelForCausalLM.from_pretrained(tiny_model_dir))).train()
    plain = torch.optim.AdamW(other.parameters(), lr=1e-3)
    expected = small("dpo", other, optimizer=plain, scheduler=StepLR(plain, 2), ref_model=tiny_model_dir).fit()
    assert equal(weights(wrapped.model), weights(expected.model))
    assert torch.equal(actor.model.module.model.norm.weight, other.model.norm.weight)


def test_a_module_that_is_compiled_in_place_is_not_compiled_again(small: Any, module: Any) -> None:
    """Its own forward would be compiled for one small check."""
    calls: list[Any] = []
    module.compile(backend=lambda graph, inputs: calls.append(graph) or graph.forward)
    module.model.layers[0].compile(backend=lambda graph, inputs: calls.append(graph) or graph.forward)
    compiled = module._compiled_call_impl
    assert equal(weights(small("dpo", module).fit().model), weights(small("dpo").fit().model))
    assert not calls
    assert module._compiled_call_impl is compiled


def test_an_adapter_in_a_wrapper(small: Any, module: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    adapted = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    trainer = small("dpo", Actor(adapted), learning_rate=None)
    assert trainer.options.learning_rate == 1e-4
    assert (trainer.fit().model / "adapter_config.json").exists()
    assert isinstance(unwrap(adapted), type(module))


def quantized(model: Any) -> Any:
    model.is_quantized = True
    return model


@pytest.mark.parametrize("argument", ["model", "ref_model", "teacher_model"])
@pytest.mark.parametrize(("change", "message"), [
    (lambda model: nn.Linear(2, 2), "is a Linear, which holds no transformers model under .model or .module"),
    (lambda model: LlamaModel(model.config), "is a LlamaModel, which has no output head over the vocabulary"),
    (quantized, "has quantized weights, which would be expanded to float32"),
    (lambda model: nn.ModuleList([model, LlamaModel(model.config)]), "holds 2 models: 0, 1")])
def test_objects_that_hold_no_model_that_can_be_trained(argument: str, change: Any, message: str, small: Any,
                                                        module: Any) -> None:
    with pytest.raises(ModelError, match=f"^the module that was passed as {argument} .*{message}"):
        small("dpo", **{argument: change(module)})


@pytest.mark.parametrize("argument", ["ref_model", "teacher_model"])
def test_frozen_models_are_others_than_the_policy(argument: str, small: Any, module: Any, tiny_model_dir: Path) -> None:
    """Also in a wrapper, or with one shared weight: freezing it would freeze the policy."""
    with pytest.raises(UsageError, match=f"^{argument} is the model that is trained"):
        small("dpo", Actor(module), **{argument: module})
    other = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    other.model.norm = module.model.norm
    with pytest.raises(UsageError, match=f"^{argument} shares weights with the model that is trained"):
        small("dpo", module, **{argument: Actor(other)})


# --- optimizers -------------------------------------------------------------------------------------------------------


def stepped(model: Any) -> torch.optim.Optimizer:
    """AdamW that has made a step on a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.float().sum().backward()
    optimizer.step()
    return optimizer


def of_model(kind: Any, **settings: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda model: {"optimizer": kind(model.parameters(), lr=1e-3, **settings)}


def scheduled(kind: Any, *arguments: Any, other: bool = False, **settings: Any) -> Callable[[Any], dict[str, Any]]:
    """An optimizer with a scheduler over it, or over another one."""
    def make(model: Any) -> dict[str, Any]:
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for _ in range(2)]
        return {"optimizer": optimizers[0], "scheduler": kind(optimizers[other], *arguments, **settings)}
    return make


def in_sequence(optimizer: Any) -> Any:
    return lr_scheduler.SequentialLR(optimizer, [StepLR(optimizer, 1), StepLR(optimizer, 1)], [2])


def frozen(model: Any) -> dict[str, Any]:
    return {"optimizer": torch.optim.AdamW(model.requires_grad_(False).parameters(), lr=1e-3)}


@pytest.mark.parametrize(("objects", "message"), [
    (scheduled(StepLR, 1, other=True), "scheduler is a StepLR of another optimizer.*Create it from the optimizer that"),
    (scheduled(in_sequence, other=True), "scheduler is a SequentialLR of another optimizer"),
    (scheduled(lr_scheduler.ReduceLROnPlateau), r"scheduler is a ReduceLROnPlateau, whose step\(\) requires metrics"),
    (scheduled(lr_scheduler.OneCycleLR, 1e-3, total_steps=2),
     "OneCycleLR with 2 steps left, but the run has 3 optimizer steps. Create it with total_steps=3"),
    (lambda model: {**scheduled(StepLR, 1)(model), "scheduler": object()}, r"of type object, which has no step\(\)"),
    (of_model(torch.optim.LBFGS), r"optimizer is a LBFGS, whose step\(\) requires closure"),
    (of_model(torch.optim.SparseAdam), "optimizer is a SparseAdam, which takes sparse gradients only"),
    (lambda model: {"optimizer": SimpleNamespace()}, "of type SimpleNamespace, which has no param_groups"),
    (frozen, "optimizer holds no weight that requires a gradient"),
    (lambda model: {"optimizer": torch.optim.SGD([{"params": []}], lr=1.0)}, "optimizer holds no weight"),
    (lambda model: {"optimizer": stepped(model), "precision": "fp64"},
     "optimizer has stepped on weights in float32, which this run converts to float64"),
    *((lambda model, kind=kind: {"optimizer": stepped(model.to(kind))},
       f"optimizer has stepped on weights in {str(kind)[6:]}, which this run converts to float32: its state would not")
      for kind in (torch.bfloat16, torch.float16))], ids=_named)
def test_optimizers_that_cannot_work_are_refused_before_the_first_step(objects: Any, message: str, small: Any,
                                                                       module: Any, tmp_path: Path) -> None:
    """By name; the module keeps its dtype, and nothing is written."""
    given = objects(module)
    kind = module.dtype
    with pytest.raises(UsageError, match=message):
        small("dpo", module, output=str(tmp_path / "never"), **given).fit()
    assert module.dtype == kind
    assert not (tmp_path / "never").exists()


class Wrapper:
    """An optimizer or a scheduler in a wrapper, as accelerate's and ColossalAI's are."""

    def __init__(self, name: str, inner: Any) -> None:
        setattr(self, name, inner)
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.parametrize("make", [
    lambda optimizer: {"scheduler": StepLR(optimizer, 1)},
    lambda optimizer: {"optimizer": Wrapper("optim", optimizer), "scheduler": StepLR(optimizer, 1)},
    lambda optimizer: {"optimizer": Wrapper("optimizer", optimizer),
                       "scheduler": Wrapper("scheduler", StepLR(optimizer, 1))},
    lambda optimizer: {"scheduler": in_sequence(optimizer)},
    lambda optimizer: {"scheduler": lr_scheduler.ChainedScheduler([StepLR(optimizer, 1)], optimizer)},
    lambda optimizer: {"scheduler": lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=3)},
    lambda optimizer: {"scheduler": SimpleNamespace(step=lambda: None)}])
def test_schedulers_of_the_optimizer_are_accepted(make: Any, small: Any, module: Any) -> None:
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    assert small("dpo", module, **{"optimizer": optimizer, **make(optimizer)}).fit().steps == 3


def test_an_optimizer_that_has_not_stepped_may_hold_half_precision(small: Any, module: Any) -> None:
    module = module.to(torch.bfloat16)
    small("dpo", module, optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3)).fit()
    assert module.dtype == torch.float32


# --- names ------------------------------------------------------------------------------------------------------------


def test_unknown_names_are_reported_all_at_once(small: Any) -> None:
    """Each with a line: what it is called here, what to use instead, or that nothing is like it."""
    with pytest.raises(UsageError) as error:
        small("dpo", betta=0.1, micro_train_batch_size=2, zzz=1, yyy=1, lora=3)
    lines = str(error.value).splitlines()
    assert lines[0] == "5 unknown options:"
    assert lines[1] == "  betta: Did you mean beta?"
    assert lines[2].startswith("  micro_train_batch_size: ")
    assert "batch-size" in lines[2]
    assert lines[3:5] == ["  zzz: no similar option", "  yyy: no similar option"]
    assert lines[5] == "  lora: is a group of options. Write lora: {rank: ...}"
    assert lines[6].startswith("Known: ")
    assert len(lines) == 7


def test_unknown_names_come_before_anything_else() -> None:
    """Code for another trainer has names and objects that are all of its own."""
    with pytest.raises(UsageError, match=r"^3 unknown options:"):
        KTOTrainer(None, strategy_=object(), zzz=1, optim=object(), train_dataloader=[], yyy=2)


# --- datasets ---------------------------------------------------------------------------------------------------------


def evaluated(result: Any) -> int:
    return json.loads((result.directory / "audit.json").read_text())["split"]["eval"]


@pytest.mark.some(3)
@pytest.mark.parametrize(("names", "options", "used"), [
    (("train", "test"), {}, (30, 13)), (("train", "validation"), {}, (30, 13)), (("train", "val"), {}, (30, 13)),
    (("train", "extra"), {}, (30, 0)), (("extra", "test"), {"split": "extra"}, (30, 13)),
    (("train", "extra"), {"eval_split": "extra"}, (30, 13)), (("train", "test"), {"split": "test"}, (13, 0)),
    (("train", "test"), {"eval_fraction": 0.01}, (29, 1)), (("train",), {}, (30, 0)), (("extra",), {}, (30, 0))],
    ids=_named)
def test_a_mapping_of_splits(names: tuple[str, ...], options: dict[str, Any], used: tuple[int, int], small: Any,
                             pairs: Path) -> None:
    """A DatasetDict: train, and validation or test for evaluation, unless the options say otherwise."""
    rows = rows_in(pairs)
    splits = dict(zip(names, (rows[:30], rows[30:]), strict=False))
    result = small("dpo", train_dataset=splits, max_steps=1, **options).fit()
    audit = json.loads((result.directory / "audit.json").read_text())
    if "eval_fraction" in options:
        assert audit["split"]["train"] + audit["split"]["eval"] == 30
    else:
        assert (audit["split"]["train"], audit["split"]["eval"]) == used
    assert any(record["split"] == "eval" for record in records(result)) == bool(used[1])


def test_splits_beside_other_data(small: Any, pairs: Path, fixture_tokenizer: Any) -> None:
    """Given as both datasets; evaluation data of its own; splits of trees; a stream, which cannot be evaluated."""
    rows = rows_in(pairs)
    splits = {"train": rows[:30], "test": rows[30:]}
    expected = small("dpo", train_dataset=rows[:30], eval_dataset=rows[30:], max_steps=1).fit()
    trees = trees_of(pairs, "paired", fixture_tokenizer)
    for train, evaluation in ((splits, splits), (splits, rows[30:]), (rows[:30], splits),
                              ({"train": trees[:30], "test": trees[30:]}, None)):
        result = small("dpo", train_dataset=train, eval_dataset=evaluation, max_steps=1).fit()
        assert equal(weights(result.model), weights(expected.model))
        assert result.before == expected.before
    stream = small("dpo", train_dataset={"train": iter(rows), "test": iter(rows)}, max_steps=1)
    assert stream.options.streaming
    assert evaluated(stream.fit()) == 0


@pytest.mark.parametrize(("data", "kind", "message"), [
    ({"one": [{}], "two": [{}]}, DataError, "no split is called train. Choose one with --split. Splits: one, two"),
    ({"prompt": ["a"], "chosen": ["b"]}, DataError, "a dict of columns .prompt, chosen., not of splits. Pass "),
    ({"prompt": "a"}, DataError, "a mapping, but not one of splits"),
    (3, UsageError, "train_dataset is of type int, which holds no rows"),
    (object(), UsageError, "train_dataset is of type object, which holds no rows"),
    (torch.utils.data.DataLoader([1]), UsageError, "a DataLoader, which yields batches. Pass it as train_dataloader")],
    ids=_named)
def test_objects_that_are_no_datasets(data: Any, kind: type[TropismError], message: str, small: Any) -> None:
    with pytest.raises(kind, match=message):
        small("dpo", train_dataset=data)


class MapStyle(torch.utils.data.Dataset[Any]):
    """A dataset of torch that takes any number, so that iterating over it would not end."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Any:
        return self.rows[number % len(self.rows)]


def test_frames_and_datasets_of_libraries(small: Any, pairs: Path) -> None:
    """Those that are installed here: of pyarrow always, of pandas, polars and datasets perhaps."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    rows = rows_in(pairs)
    made = [pyarrow.Table.from_pylist(rows), MapStyle(rows)]
    for library, make in (("pandas", lambda own: [own.DataFrame(rows)]),
                          ("polars", lambda own: [own.DataFrame(rows), own.DataFrame(rows).lazy()]),
                          ("datasets", lambda own: [own.Dataset.from_list(rows), own.DatasetDict(
                              train=own.Dataset.from_list(rows), test=own.Dataset.from_list(rows[:5]))])):
        try:
            own = __import__(library)
        except ImportError:
            continue
        made += make(own)
    expected = weights(small("dpo", train_dataset=rows, max_steps=2).fit().model)
    for data in made:
        held = {} if isinstance(data, dict) else {"eval_dataset": data}
        result = small("dpo", train_dataset=data, max_steps=2, **held).fit()
        assert equal(weights(result.model), expected)
        assert evaluated(result) == (5 if isinstance(data, dict) else 43)


# --- peft -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["peft_config", "lora"])
def test_a_lora_config_is_our_options(argument: str, small: Any) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"], use_rslora=True, bias="none",
                             task_type="CAUSAL_LM")
    trainer = small("dpo", learning_rate=None, **{argument: config})
    assert trainer.options.learning_rate == 1e-4
    ours = small("dpo", learning_rate=None, lora={"rank": 4, "alpha": 8, "targets": "q_proj,v_proj", "rslora": True})
    assert trainer.options.lora == ours.options.lora
    found, expected = (one.fit().model / "adapter_model.safetensors" for one in (trainer, ours))
    assert found.read_bytes() == expected.read_bytes()


def test_defaults_of_a_lora_config(small: Any, module: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own: alpha 8, and the targets that peft has for the model, by name or as a module."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    for model in (None, Actor(module)):
        lora = small("dpo", model, peft_config=peft.LoraConfig()).options.lora
        assert (lora.rank, lora.alpha, lora.targets) == (8, 8.0, "q_proj,v_proj")
    assert small("dpo", peft_config=peft.LoraConfig(target_modules="all-linear")).options.lora.targets is None
    trainer = small("dpo", peft_config=peft.LoraConfig(lora_dropout=0.1, modules_to_save=["lm_head"]), voice=None)
    assert "peft_config: lora_dropout 0.1 is not used, because dropout is always 0" in capsys.readouterr().out
    assert trainer.options.lora.modules_to_save == "lm_head"


def test_lora_configs_that_are_unsupported(small: Any) -> None:
    """All settings at once."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.LoraConfig(bias="all", init_lora_weights="gaussian", rank_pattern={"q_proj": 2}, inference_mode=True,
                             target_modules=".*q_proj", task_type="SEQ_CLS", exclude_modules=["k_proj"])
    with pytest.raises(UsageError) as error:
        small("dpo", peft_config=config)
    lines = str(error.value).splitlines()
    assert lines[0] == "peft_config: 7 unsupported settings:"
    assert {line.split(":")[0].strip() for line in lines[1:]} == {
        "bias", "init_lora_weights", "rank_pattern", "inference_mode", "target_modules", "task_type",
        "exclude_modules"}
    with pytest.raises(UsageError, match="peft_config is of type IA3Config, which is unsupported: Tropism trains LoRA"):
        small("dpo", peft_config=peft.IA3Config())
    with pytest.raises(UsageError, match="peft_config and lora are the same option"):
        small("dpo", peft_config=peft.LoraConfig(), lora={"rank": 2})
    with pytest.raises(UsageError, match=r"peft_config and lora_rank both set lora\.rank|lora.* both set lora\.rank"):
        small("dpo", peft_config=peft.LoraConfig(), lora_rank=2)
    with pytest.raises(UsageError, match="peft_config is of type dict, which is unsupported"):
        small("dpo", peft_config={"r": 2})


# --- train ------------------------------------------------------------------------------------------------------------


def test_train_is_another_name_of_fit(small: Any, tmp_path: Path) -> None:
    output = str(tmp_path / "run")
    small("dpo", output=output, save_every=1).train()
    assert small("dpo", output=output, save_every=1).train(resume_from_checkpoint=True).steps == 3
    assert small("dpo", output=output, save_every=1).train(True).steps == 3
    with pytest.raises(UsageError, match="resume and resume_from_checkpoint are the same"):
        small("dpo", output=output).train(True, resume_from_checkpoint=True)
    assert DPOTrainer.train.__doc__
