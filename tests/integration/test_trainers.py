"""The trainers in Python: objects where the command line takes names, the field's argument names, typed results."""

import json
import re
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from integration.conftest import assert_same_metrics, distance, records, weights
from tropism import DPOOptions, DPOTrainer, KDTrainer, KTOTrainer, SFTTrainer
from tropism.argument_names import ALIASES, ARGUMENTS, canonical
from tropism.data.dataloaders.published_layouts import LAYOUTS
from tropism.data.read_rows import read_rows
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.data.tree import PromptTree
from tropism.errors import DataError, ModelError, UsageError
from tropism.trainers import Trainer

DOC = Path(__file__).parents[2] / "docs" / "python.md"
TRAINERS: dict[str, type[Trainer]] = {"kto": KTOTrainer, "dpo": DPOTrainer, "sft": SFTTrainer, "kd": KDTrainer}


@pytest.fixture
def other(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """Another model with the same tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.2)
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def equal(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == two.keys()
    return all(torch.equal(one[name], two[name]) for name in one)


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- names ----------------------------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "max_grad_norm": 0.5, "epochs": 2, "output": "somewhere", "save_every": 2, "log_every": 3, "eval_every": 2,
    "learning_rate": 1e-4, "schedule": "cosine", "weight_decay": 0.1, "kd_weight": 0.3, "max_length": 64,
    "batch_size": 4, "loss": "ipo", "desirable_weight": 2.0, "undesirable_weight": 3.0, "warmup_ratio": 0.2,
    "track": "tensorboard", "beta": 0.7, "keep": 3, "resume": "auto",
    "lora.rank": 4, "lora.alpha": 8.0, "lora.targets": "q_proj", "lora.dora": True, "lora.rslora": True,
    "router_aux_weight": 0.01, "max_steps": 5, "precision": "fp64", "max_prompt_length": 32, "label_smoothing": 0.2,
    "f_divergence": "js", "eval_fraction": 0.25, "seed": 7, "workers": 2,
    "split": "train", "eval_split": "test", "f_alpha": 0.3, "streaming": True, "max_time": "1h", "wpo": True,
    "log_dir": "logs", "lora.adapter": "adapter", "system_prompt": "Be kind.", "checkpoint_model": True,
    "chat_template": "chatml", "lora.modules_to_save": "lm_head"}
BESIDES: dict[str, dict[str, Any]] = {
    "keep": {"save_every": 2}, "checkpoint_model": {"save_every": 2}, "f_alpha": {"f_divergence": "alpha"},
    "streaming": {"max_steps": 2}, "log_dir": {"track": "tensorboard"},
    **{f"lora.{name}": {"lora.rank": 2} for name in ("alpha", "targets", "dora", "rslora", "modules_to_save")}}


@pytest.mark.parametrize(("alias", "ours"), ALIASES.items())
def test_every_alias(alias: str, ours: str, tiny_model_dir: Path, tiny_moe_dir: Path, pairs: Path) -> None:
    """H2: the field's name sets our option; both names, or two of the field's, are an error that names them."""
    value = VALUES[ours]
    besides = {"kd_weight": {"teacher": str(tiny_model_dir)}, **BESIDES}.get(ours, {})
    trainer = DPOTrainer if ours in DPOOptions.flat_fields() else KTOTrainer
    model = tiny_moe_dir if ours == "router_aux_weight" else tiny_model_dir
    options = trainer(model, train_dataset=pairs, **besides, **{alias: value}).options
    assert options.flattened(options.model_dump())[ours] == value
    for again in (ours, *(name for name, same in ALIASES.items() if same == ours and name != alias)):
        with pytest.raises(UsageError, match=f"^{alias} and {again} are the same option"):
            trainer(model, train_dataset=pairs, **{alias: value, again: value})
    assert canonical({alias: None}) == {}
    assert canonical({alias: None, ours: value}) == {ours: value}


@pytest.mark.parametrize(("name", "ours"), ARGUMENTS.items())
def test_other_names_of_arguments(name: str, ours: str, tiny_model_dir: Path, pairs: Path) -> None:
    """H2: they mean the same argument; given twice is an error that names both."""
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    objects = {"model": module, "tokenizer": AutoTokenizer.from_pretrained(tiny_model_dir), "optimizer": optimizer,
               "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}
    renamed = {name if key == ours else key: value for key, value in objects.items()}
    trainer = DPOTrainer(**renamed, train_dataset=pairs, quiet=True)
    assert getattr(trainer.objects, ours) is objects[ours]
    with pytest.raises(UsageError, match=f"{ours} and {name} are the same argument"):
        DPOTrainer(**objects, **{name: objects[ours]}, train_dataset=pairs)


@pytest.mark.parametrize("never", [0, -1, None])
def test_never_saving(never: int | None, tiny_model_dir: Path, pairs: Path) -> None:
    assert DPOTrainer(tiny_model_dir, train_dataset=pairs, save_interval=never).options.save_every is None


@pytest.mark.parametrize(("argument", "option"), [("ref_model", "reference"), ("teacher_model", "teacher"),
                                                  ("train_dataset", "data"), ("eval_dataset", "eval_data")])
def test_arguments_are_options_too(argument: str, option: str, small: Any, pairs: Path) -> None:
    value = str(pairs)
    given = {} if argument == "train_dataset" else {"train_dataset": value}
    assert getattr(small("dpo", **{**given, argument: value}).options, option) == value
    assert getattr(small("dpo", **{**given, "train_dataset": None, "data": value, option: value}).options,
                   option) == value
    with pytest.raises(UsageError, match=f"{argument} and {option} are the same"):
        small("dpo", **{**given, argument: value, option: value})


@pytest.mark.parametrize(("changes", "message"), [
    ({"betta": 0.1}, "unknown option betta. Did you mean beta"),
    ({"train_datset": []}, "Did you mean train_dataset"), ({"ref_modle": "x"}, "Did you mean ref_model"),
    ({"logging_step": 3}, "Did you mean logging_steps"), ({"zzz": 1}, "unknown option zzz.*beta.*ref_model"),
    ({"beta": "much"}, "beta: .*'much'"), ({"loss_type": "ipoo"}, "(?i)did you mean ipo"),
    ({"train_dataset": None}, "train_dataset is required"),
    ({"scheduler": object()}, "scheduler .* optimizer"),
    ({"optimizer": object()}, "optimizer .* module"), ({"optimizer": "sgdd"}, "optimizer: .*'sgdd'"),
])
def test_what_cannot_work_is_refused_when_the_trainer_is_made(changes: dict[str, Any], message: str, small: Any,
                                                              ) -> None:
    """H2, L3: unknown names, ill-typed values, and objects that would do nothing."""
    with pytest.raises(UsageError, match=message):
        small("dpo", **changes)


def test_methods_without_a_reference_or_teacher_say_so(small: Any, pairs: Path, tiny_model_dir: Path) -> None:
    """L3: no model is accepted that nobody would ask."""
    for method, argument in (("sft", "ref_model"), ("sft", "teacher_model"), ("kd", "ref_model")):
        with pytest.raises(UsageError, match=f"{argument} has no effect on {method}"):
            small(method, train_dataset=pairs, **{argument: str(tiny_model_dir)})
    with pytest.raises(UsageError, match="teacher is required"):
        small("kd", train_dataset=pairs)
    with pytest.raises(UsageError, match="model is required"):
        DPOTrainer(train_dataset=pairs)


def test_the_documentation_lists_every_alias_layout_and_argument() -> None:
    text = DOC.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert not [alias for alias, ours in ALIASES.items()
                if not any(f"`{alias}`" in row and f"`{ours}`" in row for row in rows)]
    for name, parts in LAYOUTS.items():
        row = next(row for row in rows if row.startswith(f"| {name} |"))
        assert not [part for part in re.split(r"[ ,()/]+", parts.split(" ", 1)[1]) if part and "reject" not in part
                    and part != "with" and f"`{part}`" not in row]
    assert not [name for name in signature(Trainer).parameters if name != "options" and f"`{name}`" not in text]


# --- models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_a_module_is_trained_in_place(method: str, small: Any, module: Any) -> None:
    """The same tensors as before, with the weights that a run by name gives; the result holds them too."""
    tensors = {name: (weight, weight.data_ptr()) for name, weight in module.named_parameters()}
    result = small(method, module).fit()
    for name, weight in module.named_parameters():
        assert weight is tensors[name][0]
        assert weight.data_ptr() == tensors[name][1]
        assert torch.equal(weight, weights(result.model).get(name, weight).float())
    assert equal(weights(result.model), weights(small(method).fit().model))
    assert not module.training


def test_what_an_earlier_backward_pass_left_is_no_part_of_the_first_step(small: Any, module: Any) -> None:
    for weight in module.parameters():
        weight.grad = torch.full_like(weight, 10.0)
    assert equal(weights(small("dpo", module).fit().model), weights(small("dpo").fit().model))


def test_a_module_in_bfloat16_is_kept_in_float32(small: Any, tiny_model_dir: Path, tmp_path: Path) -> None:
    """N3: its weights are taken as they are and made float32, so that small updates add up."""
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    rounded = tmp_path / "rounded"
    AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16).float().save_pretrained(rounded)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(rounded)
    result = small("dpo", module, learning_rate=1e-6).fit()
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}
    assert equal(weights(result.model), weights(small("dpo", rounded, learning_rate=1e-6).fit().model))
    assert not equal(weights(result.model), weights(rounded))


def test_an_optimizer_and_a_scheduler_of_ones_own(small: Any, module: Any) -> None:
    """They keep their learning rate, which is what is logged; plain SGD is the same whoever brings it."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    result = small("dpo", module, optimizer=optimizer, scheduler=scheduler).fit()
    assert [record["learning_rate"] for record in records(result)] == [0.1, 0.1, 0.05]
    assert optimizer.param_groups[0]["lr"] == 0.05
    constant = {"schedule": "constant", "warmup_ratio": 0.0, "learning_rate": 0.1}
    twin = LlamaForCausalLM.from_pretrained(module.config.name_or_path)
    given = weights(small("dpo", twin, optimizer=torch.optim.SGD(twin.parameters(), lr=0.1)).fit().model)
    ours = weights(small("dpo", optimizer="sgd", **constant).fit().model)
    assert distance(given, ours) < 1e-6 * distance(ours, weights(Path(module.config.name_or_path)))


def test_an_optimizer_may_hold_some_of_the_weights(small: Any, module: Any) -> None:
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    small("kto", module, optimizer=torch.optim.AdamW(module.model.layers[1].parameters(), lr=1e-3)).fit()
    moved = {name for name, weight in module.named_parameters() if not torch.equal(weight, before[name])}
    assert moved == {name for name in before if ".layers.1." in name}


def test_optimizers_that_cannot_work(small: Any, module: Any) -> None:
    """L3: another model's weights, or options that the optimizer decides."""
    foreign = LlamaForCausalLM(module.config)
    with pytest.raises(UsageError, match="optimizer holds weights that are not the model's"):
        small("dpo", module, optimizer=torch.optim.SGD(foreign.parameters(), lr=0.1)).fit()
    own = torch.optim.SGD(module.parameters(), lr=0.1)
    for name, ours in (("learning_rate", "learning_rate"), ("lr", "learning_rate"), ("schedule", "schedule"),
                       ("lr_scheduler_type", "schedule"), ("warmup_ratio", "warmup_ratio"), ("l2", "weight_decay")):
        value = "linear" if ours == "schedule" else 0.1
        with pytest.raises(UsageError, match=f"{ours} has no effect with optimizer"):
            small("dpo", module, optimizer=own, **{name: value})


@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_a_reference_as_module_path_or_live(method: str, small: Any, module: Any, other: Path) -> None:
    """R2, R4: one reference whichever way it comes; by default it is the policy before step 1."""
    reference = AutoModelForCausalLM.from_pretrained(other)
    before = {name: weight.clone() for name, weight in reference.named_parameters()}
    by_module = small(method, module, ref_model=reference).fit()
    assert equal(weights(by_module.model), weights(small(method, ref_model=other).fit().model))
    assert all(torch.equal(before[name], weight) for name, weight in reference.named_parameters())
    assert reference.generate(torch.tensor([[7, 8]]), max_new_tokens=2, pad_token_id=2).shape == (1, 4)
    live, stored = (records(small(method, ref_model=name).fit()) for name in ("live", None))
    assert_same_metrics(live, stored, 1e-4, 1e-5)
    assert records(by_module)[0]["loss"] != pytest.approx(stored[0]["loss"], abs=1e-4)
    for argument in ("ref_model", "teacher_model"):
        with pytest.raises(UsageError, match=f"{argument} is the model that is trained"):
            small(method, module, **{argument: module})


@pytest.mark.parametrize("method", ["kd", "dpo"])
def test_a_teacher_as_module_or_path(method: str, small: Any, other: Path, pairs: Path) -> None:
    """V1: the same divergence, in a method of its own or added to another; top_k needs the store only."""
    data = pairs if method == "dpo" else [{"prompt": row["prompt"], "completion": row["chosen"]}
                                          for row in rows_in(pairs)]
    teacher = AutoModelForCausalLM.from_pretrained(other)
    by_module = small(method, teacher_model=teacher, train_dataset=data).fit()
    assert equal(weights(by_module.model), weights(small(method, teacher_model=other, train_dataset=data).fit().model))
    assert records(by_module)[0]["kd/divergence"] > 1e-4
    assert teacher.generate(torch.tensor([[7, 8]]), max_new_tokens=2, pad_token_id=2).shape == (1, 4)
    top = records(small(method, teacher_model=other, train_dataset=data, top_k=8).fit())
    assert 0 < top[0]["kd/divergence"] < records(by_module)[0]["kd/divergence"]


def test_a_module_that_comes_from_nowhere_needs_its_tokenizer(small: Any, module: Any, tiny_model_dir: Path) -> None:
    fresh = LlamaForCausalLM(module.config)
    fresh.config.name_or_path = ""
    with pytest.raises(UsageError, match="tokenizer is required"):
        small("dpo", fresh)
    result = small("dpo", fresh, tokenizer=AutoTokenizer.from_pretrained(tiny_model_dir)).fit()
    assert yaml.safe_load((result.directory / "config.yaml").read_text())["model"] == (
        "a LlamaForCausalLM given in Python")
    assert AutoTokenizer.from_pretrained(result.model).chat_template
    with pytest.raises(ModelError):
        small("dpo", "no/such/place").fit()


# --- data -----------------------------------------------------------------------------------------------------------


class LikeADataset:
    """What `datasets.Dataset` looks like from here: it can be gone through again, and knows its length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_a_dataset_of_any_kind(method: str, small: Any, data_of: dict[str, Path]) -> None:
    """One data set, one result: file by name or Path, rows as dicts, a dataset object. A generator is a stream, of
    which the steps take what they need."""
    path = data_of[method]
    rows = rows_in(path)
    expected = weights(small(method, train_dataset=path).fit().model)
    for data in (str(path), rows, LikeADataset(rows)):
        result = small(method, train_dataset=data).fit()
        assert equal(weights(result.model), expected)
    stream = small(method, train_dataset=(row for row in rows))
    needed = rows[: stream.options.max_steps * stream.options.batch_size]
    assert len(needed) < len(rows)
    assert equal(weights(stream.fit().model), weights(small(method, train_dataset=needed).fit().model))
    audit = json.loads((result.directory / "audit.json").read_text())
    assert audit["source"] == "rows given in Python"
    assert audit["rows"]["read"] == 43
    with pytest.raises(DataError, match="row 44: "):
        small(method, train_dataset=[*rows, "text"]).fit()
    with pytest.raises(DataError, match="no rows"):
        small(method, train_dataset=iter([])).fit()


def trees_of(path: Path, view: Any, tokenizer: Any) -> list[Any]:
    rows = read_rows(path, Renderer(tokenizer, Limits(512, None)), view).rows
    trees = [PromptTree(row.prompt_ids, row.completions) for row in rows]
    return trees if view != "unpaired" else [(tree, [bool(row.desirable)])
                                             for tree, row in zip(trees, rows, strict=True)]


@pytest.mark.parametrize("method", ["kto", "dpo", "sft"])
def test_trees(method: str, small: Any, data_of: dict[str, Path], fixture_tokenizer: Any, tmp_path: Path) -> None:
    """A tree of one row is that row; held-out trees are evaluated as held-out rows are."""
    path = data_of.get(method, tmp_path / "texts.jsonl")
    if method == "sft":
        path.write_text("".join(json.dumps({"prompt": row["prompt"], "completion": row["chosen"]}) + "\n"
                                for row in rows_in(data_of["dpo"])))
    trees = trees_of(path, TRAINERS[method].options_class.view, fixture_tokenizer)
    by_file = small(method, train_dataset=path, eval_dataset=path).fit()
    by_trees = small(method, train_dataset=iter(trees), eval_dataset=trees).fit()
    assert equal(weights(by_trees.model), weights(by_file.model))
    assert_same_metrics(records(by_trees), records(by_file), 0.0, 0.0)


def test_trees_of_several_completions(small: Any, fixture_tokenizer: Any, feedback: Path, tmp_path: Path) -> None:
    """The completions of a tree are rows of their own, and `group_prompts` keeps them in one step."""
    grouped: dict[bytes, tuple[Any, dict[bytes, tuple[Any, bool]]]] = {}
    for (tree, labels), row in zip(trees_of(feedback, "unpaired", fixture_tokenizer), rows_in(feedback), strict=True):
        completion, = tree.completions
        grouped.setdefault(tree.prompt_ids.tobytes(), (tree, {}))[1].setdefault(completion.key, (row, labels[0]))
    trees, lines = [], []
    by_key = {tree.completions[0].key: tree.completions[0]
              for tree, _ in trees_of(feedback, "unpaired", fixture_tokenizer)}
    for tree, members in grouped.values():
        trees.append((PromptTree(tree.prompt_ids, tuple(by_key[key] for key in members)),
                      [label for _, label in members.values()]))
        lines += [{**row, "label": label} for row, label in members.values()]
    assert max(len(tree.completions) for tree, _ in trees) > 2
    expected = small("kto", train_dataset=lines, group_prompts=True).fit()
    assert equal(weights(small("kto", train_dataset=trees, group_prompts=True).fit().model), weights(expected.model))


def test_trees_and_rows_are_not_mixed(small: Any, fixture_tokenizer: Any, feedback: Path) -> None:
    """L3: nothing that was given is left aside in silence."""
    trees, rows = trees_of(feedback, "unpaired", fixture_tokenizer), rows_in(feedback)
    for train, held_out in ((trees, rows), (trees, feedback), (rows, trees), (feedback, trees)):
        with pytest.raises(UsageError, match="one of train_dataset and eval_dataset holds trees"):
            small("kto", train_dataset=train, eval_dataset=held_out)
    for changes in ({"eval_fraction": 0.2}, {"max_prompt_length": 9}):
        with pytest.raises(UsageError, match=f"{next(iter(changes))} has no effect on trees"):
            small("kto", train_dataset=trees, **changes)
    with pytest.raises(DataError, match="tree 44: must be a PromptTree"):
        small("kto", train_dataset=[*trees, rows[0]])
