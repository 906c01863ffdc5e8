"""What the trainers in Python are given: names of options, modules in wrappers, and data of any kind."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tropism.argument_names import ALIASES
from tropism.config import MethodOptions, check_name, explain, place_of, takes_bool
from tropism.data.formats.options import FormatOptions
from tropism.data.sources.resolve import SplitChoice, resolve_source
from tropism.data.sources.splits import held_out_split
from tropism.data.tokenization.chat_template import TemplateOptions
from tropism.data.tree import PromptTree
from tropism.errors import UsageError, count_of
from tropism.model import load
from tropism.model.adapters import peft_config
from tropism.model.source import ModelSource
from tropism.model.wrapped_module import model_inside
from tropism.train.evaluation.user_evaluators import evaluator_name

RENDERING = (*FormatOptions.model_fields, *TemplateOptions.model_fields)
"""Options that control how text becomes token ids."""

OBJECT_OF = {"model": "model", "reference": "reference", "teacher": "teacher", "data": "train",
             "eval_data": "evaluation"}
"""Fields of `PythonObjects`, by the option whose place they take."""

_PASSED = "the module that was passed as {}"


# --- options ----------------------------------------------------------------------------------------------------------


def check_names(options: type[MethodOptions], names: Iterable[str], arguments: Collection[str] = ()) -> None:
    """Check that all options exist.

    Args:
        arguments: names of arguments that are no options.

    Raises:
        UsageError: with a line for each unknown name.
    """
    fields = options.flat_fields()
    known = {*fields, *arguments, *(name for name, ours in ALIASES.items() if ours in fields)}
    problems: dict[str, UsageError] = {}
    for name in names:
        try:
            check_name(options, name, known)
        except UsageError as error:
            problems[name] = error
    if len(problems) == 1:
        raise next(iter(problems.values()))
    if problems:
        lines = [f"  {name[:100]}: " + str(error).removeprefix(f"unknown option {name[:100]}. ").removeprefix(
            f"{name}: ") for name, error in problems.items()]
        listed = [line.partition(": ")[2] for line in lines if ": Known: " in line][:1]
        raise UsageError(f"{count_of(len(problems), 'unknown option')}:",
                         *(f"{line.partition(': ')[0]}: no similar option" if ": Known: " in line else line
                           for line in lines), *listed)


def make_options(options: type[MethodOptions], values: Mapping[str, Any],
                 arguments: Collection[str] = ()) -> MethodOptions:
    """Typed options.

    Args:
        arguments: as in `check_names`.

    Raises:
        UsageError: for unknown names, with the closest known ones, or an invalid value.
    """
    fields = options.flat_fields()
    values = options.flattened(values)
    check_names(options, (name for name in values if name not in fields), arguments)
    for name, value in values.items():
        if isinstance(value, bool) and not takes_bool(fields[name].annotation):
            raise UsageError(f"{name}: {value} is not a valid value")
    try:
        return options.model_validate(options.nested(values))
    except ValidationError as error:
        problem = error.errors()[0]
        name = place_of(problem, fields)
        if problem["type"] == "missing":
            raise UsageError(f"{name} is required") from None
        raise UsageError(f"{name}: {explain(problem)}") from None


def refuse_with(values: Mapping[str, Any], owner: str, names: Sequence[str]) -> None:
    """Refuse options that something else decides.

    Raises:
        UsageError: for the first of `names` that is set.
    """
    for name in names:
        if name in values:
            raise UsageError(f"{name} has no effect with {owner}, which sets it. Remove one of them.")


def with_evaluators(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Values in which functions given as `evaluator` are replaced by their names, and the functions.

    Raises:
        UsageError: if functions and names are mixed.
    """
    given = values.get("evaluator")
    listed = list(given) if isinstance(given, list | tuple) else [given]
    if given is None or all(isinstance(one, str) for one in listed):
        return dict(values), []
    if any(one is None or isinstance(one, str) for one in listed):
        raise UsageError("evaluator has functions and names. Pass only functions, or only names.")
    names: list[str] = []
    for one in map(evaluator_name, listed):
        names.append(one if one not in names else f"{one}-{len(names) + 1}")
    return {**values, "evaluator": ",".join(names)}, listed


# --- models -----------------------------------------------------------------------------------------------------------


def modules_inside(given: Mapping[str, Any]) -> dict[str, Any]:
    """Models by argument, each as a name or as the transformers module in what was passed.

    Args:
        given: `model`, `ref_model` and `teacher_model`: names, modules, or None.

    Raises:
        ModelError: for an object that holds no model.
        UsageError: if a frozen model is the model that is trained, or shares weights with it.
    """
    found = {name: value if value is None or isinstance(value, str | Path) else
             model_inside(value, _PASSED.format(name)) for name, value in given.items()}
    if isinstance(found["model"], str | Path | None):
        return found
    own = {id(weight) for weight in found["model"].parameters()}
    for name, advice in (("ref_model", "Omit it: the reference is then the model before step 1."),
                         ("teacher_model", "Pass a copy of it.")):
        other = found[name]
        if other is found["model"]:
            raise UsageError(f"{name} is the model that is trained. {advice}")
        if other is not None and not isinstance(other, str | Path) and any(
                id(weight) in own for weight in other.parameters()):
            raise UsageError(f"{name} shares weights with the model that is trained, so it would not stay as it is. "
                             f"{advice}")
    return found


def with_lora_options(options: Mapping[str, Any], model: Any) -> tuple[dict[str, Any], list[str]]:
    """Options in which a configuration of peft, as `peft_config` or `lora`, is replaced by ours.

    Args:
        model: a name or a module, for peft's default targets.

    Returns:
        the options, and a sentence for each setting that is ignored.

    Raises:
        UsageError: naming all settings that are unsupported.
    """
    given = {name: options[name] for name in ("peft_config", "lora") if options.get(name) is not None
             and (name == "peft_config" or peft_config.is_config(options[name]))}
    if not given:
        return {name: value for name, value in options.items() if name != "peft_config"}, []
    if len(given) > 1 or ("peft_config" in given and options.get("lora") is not None):
        raise UsageError("peft_config and lora are the same option. Pass one of them.")
    (name, config), = given.items()

    def model_type() -> str:
        if model is None:
            raise UsageError("model is required. Pass a name or a module.")
        if isinstance(model, str | Path):
            return str(load.load_config(ModelSource.of(str(model))).model_type)
        return str(model_inside(model, _PASSED.format("model")).config.model_type)

    lora, notes = peft_config.lora_options(config, name, model_type)
    return {**{key: value for key, value in options.items() if key not in given}, "lora": lora}, notes


def check_objects(values: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Check that objects that need each other are passed together.

    Raises:
        UsageError: for a missing object, or an option without effect.
    """
    if objects["optimizer"] is not None:
        refuse_with(values, "optimizer", ("learning_rate", "schedule", "warmup_ratio", "weight_decay"))
        if "model" not in objects:
            raise UsageError("optimizer requires the module that it optimizes. Pass it as model.")
    elif objects["scheduler"] is not None:
        raise UsageError("scheduler requires its optimizer. Pass both, or set schedule and learning_rate instead.")
    if "model" in objects and objects["tokenizer"] is None and not origin(objects["model"]):
        raise UsageError("tokenizer is required, because the module has no name to load it from. Pass its tokenizer.")


def name_of(value: Any) -> str:
    """The name of an object in config.yaml."""
    source = f" (from {origin(value)})" if origin(value) else ""  # not a path: the module may have been trained since
    return f"a {type(value).__name__} given in Python{source}"


def origin(module: Any) -> str:
    """The name that a module was loaded from, or an empty string."""
    return str(getattr(getattr(module, "config", None), "name_or_path", "") or "")


# --- data -------------------------------------------------------------------------------------------------------------


def find_data(values: dict[str, Any], objects: dict[str, Any]) -> None:
    """Find the rows in what was passed as datasets, and separate trees from rows as dicts, in place.

    Of a mapping of splits one is chosen, as in a directory: train, and for evaluation validation or test. Without
    evaluation data, the held-out split of the training data is that.

    Raises:
        UsageError: if only one dataset holds trees, an object holds no rows, or an option has no effect on them.
        DataError: if no split is the obvious one.
    """
    _find_splits(values, objects)
    for source, argument in (("train", "train_dataset"), ("evaluation", "eval_dataset")):
        if source in objects:
            objects[source] = _rows_in(objects[source], argument)
        if isinstance(objects.get(source), Iterator):  # looking at the first entry must not consume it
            first = list(islice(objects[source], 1))
            objects[source] = first + list(objects[source]) if _trees(first) else chain(first, objects[source])
        if (trees := _trees(objects.get(source))) is not None:
            objects.pop(source)
            objects[f"{source}_trees"] = trees
        elif objects.get(source) is not None and not isinstance(objects[source], Sized):
            if source == "evaluation":
                raise UsageError("eval_dataset is a stream without a length. Pass a list of its rows.")
            values["streaming"] = True
    if "eval_data" in values and ("train_trees" in objects) != ("evaluation_trees" in objects):
        raise UsageError("only one of train_dataset and eval_dataset holds trees. Pass both as trees or both as rows.")
    for name in ("eval_fraction", "max_prompt_length", "overlong", *RENDERING):
        if "train_trees" in objects and name in values:
            raise UsageError(f"{name} has no effect on trees, which are already token ids. Remove it"
                             + (" and pass eval_dataset." if name == "eval_fraction" else "."))


def _find_splits(values: dict[str, Any], objects: dict[str, Any]) -> None:
    """Choose the splits of mappings, in place. Those of rows with a length stay mappings, so that the log names them.
    """
    train = objects.get("train")
    for source, option in (("train", "split"), ("evaluation", "eval_split")):
        given = objects.get(source)
        if source == "evaluation" and given is None and isinstance(train, Mapping) and "eval_data" not in values and (
                not values.get("eval_fraction")):
            own = resolve_source(train, split=SplitChoice(values.get("split")))[0].records
            wanted = values.get("eval_split") or held_out_split([*map(str, train)])
            if wanted is None or train.get(wanted) is own or not isinstance(train.get(wanted), Sized):
                continue
            objects[source] = given = train
            values["eval_data"] = values["data"]
        if not isinstance(given, Mapping):
            continue
        held_out = source == "evaluation"
        rows = resolve_source(given, split=SplitChoice(values.get(option), f"--{option.replace('_', '-')}",
                                                       held_out))[0].records
        if not isinstance(rows, Sized) or _trees(rows) is not None:
            objects[source] = rows
            values.pop(option, None)


def _rows_in(value: Any, argument: str) -> Any:
    """Something that holds rows; a lazy table is computed.

    Raises:
        UsageError: for an object that holds no rows.
    """
    if hasattr(value, "collect") and hasattr(value, "collect_schema"):  # a LazyFrame of polars
        value = value.collect()
    if hasattr(value, "batch_sampler") and hasattr(value, "collate_fn"):
        raise UsageError(f"{argument} is a {type(value).__name__}, which yields batches. Pass it as "
                         f"{argument.replace('dataset', 'dataloader')}.")
    if not isinstance(value, Iterable) and hasattr(value, "__len__") and not hasattr(value, "to_pylist"):
        return [value[number] for number in range(len(value))]  # a map-style dataset of torch
    if not isinstance(value, Iterable) and not hasattr(value, "__getitem__"):
        raise UsageError(f"{argument} is of type {type(value).__name__}, which holds no rows. Pass a file, rows as "
                         "dicts, a table, a dataset or trees.")
    return value


def _trees(source: Any) -> list[Any] | None:
    """The trees, or trees with labels, in a source; None if it holds something else."""
    if source is None or isinstance(source, str | Path | Mapping):
        return None
    if isinstance(source, Iterator):
        return None
    first = next(iter(source), None)
    is_tree = isinstance(first, PromptTree) or (
        isinstance(first, tuple) and len(first) == 2 and isinstance(first[0], PromptTree))
    return list(source) if is_tree else None
