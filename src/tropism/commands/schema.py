"""`tropism schema`: a JSON schema of the YAML files of `tropism train`, for editors and checks.

It is made from the classes of options, so it has their descriptions, choices, limits and defaults.
"""

from typing import Any

from tropism.config import METHODS

DRAFT = "http://json-schema.org/draft-07/schema#"
"""The draft that editors know best."""

_NUMBER_AS_TEXT = {"type": "string", "pattern": r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"}
"""YAML 1.1 reads 1e-6 as text, which is taken as the number."""
_LIST: dict[str, Any] = {"type": "array"}
_MAPPING: dict[str, Any] = {"type": "object"}
_ALSO: dict[str, list[dict[str, Any]]] = {
    "loss": [_LIST], "loss_weights": [_LIST, {"type": "number"}], "track": [_LIST], "targets": [_LIST],
    "modules_to_save": [_LIST], "columns": [_LIST, _MAPPING], "labels": [_LIST, _MAPPING],
    "chat_template_kwargs": [_MAPPING], "compile": [{"type": "boolean"}], "shard": [{"type": "boolean"},
                                                                                   {"type": "null"}],
    "resume": [{"type": "boolean"}], "microbatch_tokens": [{"type": "null"}],
    "store_limit": [{"type": "integer"}, {"type": "null"}], "memory_limit": [{"type": "integer"}]}
"""Further forms in which a file can give a value, by the name of the option without its group."""


def schema(method: str | None = None) -> dict[str, Any]:
    """The schema of a file.

    Args:
        method: that the files are for; None for files of any method, which `method:` names.
    """
    found = {name: _schema_of(name) for name in METHODS if method in (None, name)}
    definitions: dict[str, Any] = {}
    for options in found.values():
        definitions |= options.pop("$defs", {})
    head = {"$schema": DRAFT, "title": "Options of tropism train"}
    if method is not None:
        return {**head, **found[method], "$defs": definitions}
    named = {"enum": list(METHODS), "description": "What is trained: kto, dpo, sft or kd."}
    chosen = [{"if": {"properties": {"method": {"const": name}}, "required": ["method"]},
               "then": {"$ref": f"#/$defs/{name}"}} for name in found]
    return {**head, "type": "object", "properties": {"method": named}, "required": ["method"], "allOf": chosen,
            "$defs": {**definitions, **found}}


def _schema_of(method: str) -> dict[str, Any]:
    """The schema of the options of a method. Nothing is required: the command line may add what a file lacks."""
    found: dict[str, Any] = _plain(METHODS[method].model_json_schema())
    found.pop("required", None)
    found["properties"] = {"method": {"const": method, "description": found["description"]}, **found["properties"]}
    options = found["properties"]  # a file never allows code to run
    options["trust_remote_code"] |= {"const": False}
    options["evaluator"] = {"description": options["evaluator"]["description"], "enum": ["none", None]}
    return found


def _plain(node: Any) -> Any:
    """A schema without titles, with descriptions of one line, and with the other forms of values."""
    if isinstance(node, list):
        return [_plain(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    found: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            found[key] = {name: _with_forms(name, _plain(option)) for name, option in value.items()}
        elif key == "description":
            found[key] = " ".join(value.split())
        elif not (key in ("title", "required") or (key == "default" and value is None)):
            found[key] = value if key == "default" else _plain(value)
    return found


def _with_forms(name: str, option: dict[str, Any]) -> dict[str, Any]:
    """An option with the other forms that a file may give it."""
    outside: dict[str, Any] = {key: option[key] for key in ("description", "default") if key in option}
    inside = {key: value for key, value in option.items() if key not in outside}
    forms = inside["anyOf"] if inside.keys() == {"anyOf"} else [inside]
    more = [*_ALSO.get(name, []), *([_NUMBER_AS_TEXT] if any(form.get("type") == "number" for form in forms) else [])]
    more = [form for form in more if form not in forms]
    return {**outside, **({"anyOf": [*forms, *more]} if more else inside)}
