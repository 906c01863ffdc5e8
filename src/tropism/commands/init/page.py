"""The configuration as YAML, each value below its reason."""

from typing import Any

import yaml

from tropism.commands.init.choose import Initial
from tropism.printable import one_line


def page(found: Initial, name: str) -> str:
    """The text of the file.

    Args:
        name: of the file, for the command in its first lines.
    """
    title = {"kto": "KTO", "dpo": "DPO", "sft": "SFT", "kd": "distillation"}[found.method]
    lines = [f"# {title} for this model and data, chosen by `tropism init`. Other options keep their defaults:",
             f"# see `tropism {found.method} --help-all`. To train: tropism train {one_line(name)}",
             "#", *(f"# {one_line(line)}" for line in found.about)]
    if found.findings:
        lines += ["#", "# The data:", *(f"# {finding.word}: {one_line(finding.text)}" for finding in found.findings)]
    lines += ["", f"method: {found.method}"]
    group = ""
    for key, value in _ordered(found.values).items():
        owner, _, inner = key.rpartition(".")
        if owner != group:
            lines += ["", f"{owner}:"] if owner else []
            group = owner
        indent = "  " if owner else ""
        lines += [] if owner and lines[-1] == f"{owner}:" else [""]
        lines += [f"{indent}# {one_line(found.reasons[key])}", f"{indent}{_entry(inner, value)}"]
    return "\n".join(lines) + "\n"


def _ordered(values: dict[str, Any]) -> dict[str, Any]:
    """Plain options first, then groups."""
    return dict(sorted(values.items(), key=lambda entry: entry[0].rpartition(".")[0]))


def _entry(name: str, value: Any) -> str:
    """One option as YAML, on one line."""
    if isinstance(value, str) and not value.isprintable():
        return f"{name}: {yaml.safe_dump(value, width=2**31 - 1, default_style=chr(34)).rstrip()}"
    text: str = yaml.safe_dump({name: value}, width=2**31 - 1, allow_unicode=True).rstrip()
    return text.replace("e-0", "e-") if isinstance(value, float) else text
