"""What the processes of a run compare before it starts: options, models, versions, data and weights."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tropism.data.options import DataOptions
from tropism.data.row_facts import facts_of
from tropism.data.rows import EncodedRow
from tropism.data.tokenization.chat_template import template_text
from tropism.distributed.agreement import Fact, Facts, check_same
from tropism.distributed.world import World
from tropism.errors import count_of
from tropism.model.adapters.switch import active_scales
from tropism.model.content import ModelFile, adapter_files, model_files, revision_of
from tropism.model.fingerprint import deciding_settings, tensor_hash, weight_hashes
from tropism.model.source import ModelSource
from tropism.observe import manifest
from tropism.options import Options, shown
from tropism.train.setup.data import PreparedData, data_fingerprint, steps_fingerprint
from tropism.train.setup.python_objects import PythonObjects

MAY_DIFFER = frozenset(("store", "store_limit", "workers", "track", "log_dir", "report"))
"""Options that each process may set as its machine needs. Only the main process uses `track`, `log_dir` and
`report`; rows and scores do not depend on the others. The processes share the store of a teacher's tokens (`top_k`)."""

_BY_CONTENT = frozenset(("model", "reference", "teacher", "lora.adapter", "data", "eval_data", "chat_template"))
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")


def facts_at_start(command: str, options: Options, named: Mapping[str, Any],
                   objects: PythonObjects | None = None) -> Facts:
    """Everything that is known before anything is loaded.

    Args:
        command: what the process does.
        options: of the run.
        named: models by the option that names them: a `ModelSource`, a module, or None.
        objects: of a Python caller.

    Raises:
        TropismError: if a file cannot be read.
    """
    objects = objects or PythonObjects()
    values = options.flattened(options.dump())
    facts = {"command": Fact.of(command)}
    for option, model in named.items():
        facts |= _of_model(_flag(option), model)
    if adapter := values.get("lora.adapter"):
        facts |= {"--lora.adapter": Fact("files", adapter),
                  **_of_files("--lora.adapter", adapter_files(Path(adapter).expanduser()))}
    facts |= facts_of_options(options)
    if objects.rows is not None:  # they are read another way
        facts["--data"] = Fact("token ids", str(values["data"]))
    return {**facts, **dict(_of_optimizer(objects)), **dict(_of_machine())}


def facts_of_options(options: Options) -> dict[str, Fact]:
    """Every option that is set, with files by their content."""
    values = options.flattened(options.dump())
    may_differ = MAY_DIFFER - ({"store"} if values.get("top_k") else set())
    facts = {}
    if template := values.get("chat_template"):
        text = _digest(template_text(template))
        facts["--chat-template"] = Fact(text, f"{template} ({text[:12]})")
    if values.get("reference") == "live":
        facts["--reference"] = Fact.of("live")
    for name in ("data", "eval_data"):  # the rows are compared when they have been read
        if values.get(name):
            facts[_flag(name)] = Fact("given", str(values[name]))
    for name, value in values.items():
        if value is not None and name not in may_differ | _BY_CONTENT | {"method"}:
            is_path = name == "output" or (name == "resume" and os.path.exists(value))
            key = os.path.realpath(value) if is_path else str(value)
            facts[_flag(name)] = Fact(key, _spell(value))
    return facts


def facts_of_data(data: PreparedData, tokenizer: Any, options: DataOptions, objects: PythonObjects) -> Facts:
    """The texts that decide token ids, and the rows."""
    texts = manifest.text_fingerprints(tokenizer)
    tokens = getattr(tokenizer, "special_tokens_map", {})
    facts = {"tokenizer": Fact.of(texts["tokenizer"][:12]), "special tokens of the tokenizer": Fact.of(_plain(tokens)),
             "chat template": Fact.of(texts["template"][:12])}
    for name, rows in (("data", data.train), ("eval_data", data.evaluation)):
        if rows:
            facts |= facts_of_rows(_flag(name), str(getattr(options, name) or options.data), rows)
    if objects.steps is not None:
        facts["steps of the dataloader"] = Fact.of(steps_fingerprint(objects.steps)[:12])
    return facts


def facts_of_rows(flag: str, source: str, rows: Sequence[EncodedRow]) -> dict[str, Fact]:
    """The rows of a source, and their order."""
    facts, digest = facts_of(rows), data_fingerprint(rows)
    partners = [row.partner.key for row in rows if row.partner is not None] if isinstance(rows, list) else []
    key = _digest(digest, facts.prompt.tobytes(), facts.split.tobytes(), *partners)
    assert facts.weight is not None
    columns = np.column_stack([facts.prompt, facts.completion, facts.desirable.astype(np.uint64), facts.split,
                               facts.weight.view(np.uint64)])
    mixed = (columns * (np.uint64(0x9E3779B97F4A7C15) ** np.arange(1, 7, dtype=np.uint64))).sum(1)  # modulo 2^64
    unordered = _digest(np.sort(mixed).tobytes(), *sorted(partners))
    counted = f"{source}: {count_of(len(rows), 'row')}"
    return {flag: Fact(unordered, f"{counted} ({unordered[:12]})"),
            f"{flag}: order of the rows": Fact(key, f"{counted} in order {key[:12]}")}


def check_weights(world: World, name: str, module: Any) -> None:
    """Check that all processes hold a full model with the same weights. All of them call this together.

    Raises:
        UsageError: naming the weights that differ.
    """
    def describe() -> Facts:
        hashes = (line.partition(" ") for line in (*weight_hashes(module), *active_scales(module)))
        return {f"{name}: {weight}": Fact(found, found[-32:][:12]) for weight, _, found in hashes}

    if world.mesh is None:
        check_same(world, describe, "Load the same weights in all of them.")


def _of_model(flag: str, model: Any) -> dict[str, Fact]:
    """What a model is, and its files if it is a directory."""
    if model is None:
        return {}
    if not isinstance(model, ModelSource):
        settings = deciding_settings(model.config).items()
        return {flag: Fact.of(f"a {type(model).__name__} given in Python"),
                **{f"{flag}: {name} of its config": Fact.of(_plain(value)) for name, value in settings}}
    if not Path(model.name).is_dir():
        revision = revision_of(model)
        return {flag: Fact(f"{model.name} {revision}", f"{model.name} ({revision[:12] or 'not found'})"),
                **_of_files(f"{flag}: adapter", adapter_files(model.adapter) if model.adapter else [])}
    return {flag: Fact("files", model.absolute),
            **_of_files(f"{flag}: adapter", adapter_files(model.adapter) if model.adapter else []),
            **_of_files(flag, model_files(model))}


def _of_files(name: str, files: Sequence[ModelFile]) -> dict[str, Fact]:
    return {f"{name}: {file.name}": Fact(file.hash, f"{file.path} ({file.hash[:12]})") for file in files}


def _of_optimizer(objects: PythonObjects) -> Iterator[tuple[str, Fact]]:
    """Type, settings and state of the user's optimizer and scheduler."""
    optimizer = objects.optimizer
    if optimizer is not None:
        yield "optimizer", Fact.of(type(optimizer).__name__)
        for number, group in enumerate(optimizer.param_groups):
            which = f" of group {number}" if len(optimizer.param_groups) > 1 else ""
            for name, value in group.items():
                known = [list(weight.shape) for weight in value] if name == "params" else value
                yield f"optimizer: {name}{which}", Fact.of(_plain(known))
        state = list(optimizer.state.values())
        yield "optimizer: state", Fact.of(_digest(_plain(state))[:12])
    if objects.scheduler is not None:
        yield "scheduler", Fact.of(type(objects.scheduler).__name__)
        state_of = getattr(objects.scheduler, "state_dict", dict)
        for name, value in state_of().items():
            yield f"scheduler: {name}", Fact.of(_plain(value))


def _of_machine() -> Iterator[tuple[str, Fact]]:
    """Versions, and settings of torch and of the environment that change results."""
    for name, installed in manifest.libraries().items():
        loaded = str(getattr(sys.modules.get(name), "__version__", installed))
        same = loaded.partition("+")[0] == installed.partition("+")[0]
        yield f"version of {name}", Fact.of(loaded if same else f"{loaded} (installed as {installed})")
    code = manifest.code_hash()
    yield "code of tropism", Fact(code, f"{manifest.PACKAGE} ({code[:12]})")
    yield "Python", Fact.of(platform.python_version())
    yield "device", Fact.of("cuda" if torch.cuda.is_available() else "cpu")
    yield "torch.get_default_dtype()", Fact.of(torch.get_default_dtype())
    yield "torch.get_float32_matmul_precision()", Fact.of(torch.get_float32_matmul_precision())
    yield "torch.are_deterministic_algorithms_enabled()", Fact.of(torch.are_deterministic_algorithms_enabled())
    for name in _VARIABLES:
        if name in os.environ:
            yield name, Fact.of(os.environ[name])


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _spell(value: Any) -> str:
    """An option's value as YAML writes it, with all digits that tell it from others."""
    short = shown(value)
    return repr(value) if isinstance(value, float) and float(short) != value else short


def _plain(value: Any) -> str:
    """A value of a Python object as text that is the same in every process."""
    def other(one: Any) -> Any:
        if isinstance(one, torch.Tensor) and one.numel() > 1:
            return tensor_hash(one)
        return one.tolist() if hasattr(one, "tolist") else type(one).__name__

    return json.dumps(value, default=other, sort_keys=True)


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()
