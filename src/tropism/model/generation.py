"""The generation config of a model: read it, correct what transformers would refuse to save, or set it aside."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import cached_file, logging

from tropism.borders import read_object
from tropism.errors import clause, first_line

FILE = "generation_config.json"
_FIRST = ("do_sample", "num_beams", "use_cache", "return_dict_in_generate")
"""Settings that decide whether others are valid."""
_NAME = re.compile(r"^- `\w+`: ")


def read_generation(name: str | Path, revision: str | None = None,
                    ) -> tuple[GenerationConfig | None, list[str]]:
    """The generation config of a model, corrected, and a sentence for each correction. None if there is no such file.

    Args:
        name: a directory as a path, or the name of one or of a model on the hub. A path is never looked up on the hub.
        revision: of a model on the hub.

    Raises:
        ModelError: if the file is not a JSON object.
    """
    path = Path(name)
    try:
        found = str(path / FILE) if path.is_dir() or isinstance(name, Path) else cached_file(
            name, FILE, revision=revision, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False)
    except (OSError, ValueError):  # not a name that the hub accepts
        found = None
    if found is None or not Path(found).is_file():
        return None, []
    return _corrected(read_object(Path(found)), str(path / FILE))


def corrected(generation: Any) -> tuple[Any, list[str]]:
    """A generation config that transformers saves, and a sentence for each correction. A valid one is unchanged."""
    with _muted():
        if _problem(generation) is None:
            return generation, []
    return _corrected(generation.to_diff_dict(), "the model's generation config")


@contextmanager
def generating(module: Any, **settings: Any) -> Iterator[None]:
    """Context in which a model's generation config has these settings alone. Its own, such as stop strings or another
    cache, may need more than ids, or packages that are not installed."""
    own, module.generation_config = module.generation_config, GenerationConfig(**settings)
    try:
        yield
    finally:
        module.generation_config = own


def _corrected(values: Mapping[str, Any], place: str) -> tuple[GenerationConfig, list[str]]:
    with _muted():
        whole, _ = _made(values)
        if whole is not None:
            return whole, []
        kept, dropped = _valid_part(values)
        if dropped and values.get("do_sample") is not True:
            # Temperature and the like beside do_sample=false: servers use them, and only sampling makes them valid.
            sampled, still = _valid_part({**values, "do_sample": True})
            if len(still) < len(dropped):
                gained = [name for name in dropped if name not in still]
                said = [f"{place}: do_sample is set to true, because {_listed(gained)} "
                        f"{'applies' if len(gained) == 1 else 'apply'} to sampling only"]
                return _finish(sampled, said, still, values, place)
        return _finish(kept, [], dropped, values, place)


def _finish(kept: Mapping[str, Any], said: list[str], dropped: Mapping[str, str], values: Mapping[str, Any],
            place: str) -> tuple[GenerationConfig, list[str]]:
    made, _ = _made(kept)
    assert made is not None
    return made, said + [f"{place}: {name} = {json.dumps(values[name], default=str)[:40]} is ignored and not saved, "
                         f"because transformers rejects it: {clause(reason)}" for name, reason in dropped.items()]


def _valid_part(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values with which transformers saves a generation config, and why it rejects each of the others."""
    order = sorted(values, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    kept: dict[str, Any] = {}
    dropped: dict[str, str] = {}
    for name in order:
        made, problem = _made({**kept, name: values[name]})
        if made is not None:
            kept[name] = values[name]
        else:
            dropped[name] = problem or ""
    return {name: kept[name] for name in values if name in kept}, dropped


def _made(values: Mapping[str, Any]) -> tuple[GenerationConfig | None, str | None]:
    """A generation config of these values; None, and the reason, if transformers rejects them."""
    try:
        made = GenerationConfig.from_dict(dict(values))
    except Exception as error:  # its checks compare values of any type
        return None, _reason(error)
    problem = _problem(made)
    return (made, None) if problem is None else (None, problem)


def _problem(generation: Any) -> str | None:
    try:
        generation.validate(strict=True)
    except Exception as error:  # as above
        return _reason(error)
    return None


def _reason(error: Exception) -> str:
    """The issue that transformers names. Its first line only says that there is one."""
    lines = str(error).splitlines()
    named = next((line for line in lines if line.startswith("- ")), "")
    return (_NAME.sub("", named) or first_line(error)).partition(". ")[0]


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


@contextmanager
def _muted() -> Iterator[None]:
    """Mute transformers, which logs what is corrected here."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
