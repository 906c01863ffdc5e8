"""Write the tables of the documentation that describe options, commands and metrics, from the code.

Each table is between two comments, `<!-- generated: NAME -->` and `<!-- end -->`. The text around it is handwritten.

    python tools/make_reference.py            write them
    python tools/make_reference.py --check    exit with code 1 if one is stale
"""

import argparse
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tropism import config
from tropism.argument_names import PUBLISHED, answer
from tropism.cli.table import COMMANDS, HEADINGS, in_order
from tropism.compat.trl.config import CONFIGS
from tropism.compat.trl.fields import fields_of
from tropism.config import METHODS
from tropism.methods import LOSSES
from tropism.methods.loss_table import LossRow
from tropism.observe.metrics import METRICS
from tropism.options import Option, shown
from tropism.trainers import Trainer

DOCS = Path(__file__).parents[1] / "docs"
FILES = ("options.md", "run-directory.md", "coming-from/trl.md",
         *(f"coming-from/{trainer}.md" for trainer in PUBLISHED))
_BLOCK = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def training_options() -> dict[str, dict[str, Option]]:
    """Options of each method by name."""
    return {method: {option.name: option for option in options.described()} for method, options in METHODS.items()}


def preference_losses(method: str) -> dict[str, LossRow]:
    """Losses that `--loss` takes for `kto` or `dpo`."""
    return {name: row for name, row in LOSSES[METHODS[method].view].items() if not row.needs_teacher}


def losses_with(method: str, name: str) -> list[str]:
    """Losses of a method that an option has an effect on."""
    special: dict[str, Callable[[LossRow], bool]] = {
        "wpo": lambda row: row.weighted, "ld_alpha": lambda row: row.needs_reference}
    takes = special.get(name, lambda row: name in row.options)
    return [loss for loss, row in preference_losses(method).items() if takes(row)]


def default_of_losses(method: str, name: str) -> str:
    """Default of an option of losses, with the losses that have another one; empty for an option of no loss."""
    values = {loss: shown(row.options[name]) for loss, row in preference_losses(method).items() if name in row.options}
    if not values:
        return ""
    usual = Counter(values.values()).most_common(1)[0][0]
    others = ", ".join(f"`{loss}` {value}" for loss, value in values.items() if value != usual)
    return f"{usual} ({others})" if others and len(values) > 1 else usual


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _values(option: Option) -> str:
    words = [f"`{choice}`" for choice in option.choices]
    return ", ".join([option.values, *words] if option.values == "FLOAT" else words) or option.values or "true, false"


def _row(option: Option, default: str, methods: Sequence[str] = ()) -> list[str]:
    own = "" if len(methods) in (0, len(METHODS)) else ", ".join(f"`{method}`" for method in methods) + ": "
    return [f"`{option.flag}`", _values(option), default or "-", own + option.text]


def options_table(heading: str) -> str:
    """Options of one group over all methods; one row for each description."""
    found: dict[tuple[str, str], dict[str, Option]] = {}
    for method, options in training_options().items():
        for option in in_order(options.values()):
            name = option.name
            if option.heading == heading and not (heading == "Method" and _of_losses(name)):
                found.setdefault((name, option.text), {})[method] = option
    rows = []
    for methods in found.values():
        defaults: dict[str, list[str]] = {}
        for method, option in methods.items():
            defaults.setdefault("required" if option.info.is_required() else option.default, []).append(method)
        text = next(iter(defaults)) if len(defaults) == 1 else ", ".join(
            f"{default} (" + ", ".join(f"`{method}`" for method in names) + ")" for default, names in defaults.items())
        rows.append(_row(next(iter(methods.values())), text, list(methods)))
    return table(("option", "value", "default", "description"), rows)


def _of_losses(name: str) -> bool:
    return any(losses_with(method, name) for method in ("kto", "dpo"))


def losses_table(method: str) -> str:
    """Options of the losses of a method, with the losses that take them."""
    everything = list(preference_losses(method))
    rows = []
    for name, option in training_options()[method].items():
        takers = losses_with(method, name)
        if not takers:
            continue
        others = [loss for loss in everything if loss not in takers]
        named = "all but " + ", ".join(f"`{loss}`" for loss in others) if len(others) < len(takers) else (
            ", ".join(f"`{loss}`" for loss in takers))
        rows.append([f"`{option.flag}`", _values(option), option.default or "-", named, option.text])
    return table(("option", "value", "default", "losses", "description"), rows)


def commands_table(group: str) -> str:
    """What each command of a group does, with its own options; those that mean the same in training are only named."""
    parts = []
    training = {(name, option.text) for options in training_options().values() for name, option in options.items()}
    for name, command in COMMANDS.items():
        if command.group != group or name in METHODS:
            continue
        options = in_order(getattr(config, command.options).described()) if command.options else []
        own = [option for option in options if (option.name, option.text) not in training]
        usage = " ".join([*(argument.name for argument in command.arguments if argument.required),
                          *(f"{option.flag} {option.values}" for option in options if option.info.is_required())])
        parts.append(f"### `tropism {name}{' ' + usage if usage else ''}`\n\n{command.summary} {command.note}".strip()
                     + "\n\n" + "\n".join(f"    {example}" for example in command.examples) + "\n")
        rows = [[f"`{argument.name}`", argument.default or ("required" if argument.required else "-"), argument.text]
                for argument in command.arguments]
        rows += [[f"`{option.flag}`", "required" if option.info.is_required() else option.default or "-", option.text]
                 for option in own]
        if rows:
            parts.append(table(("argument", "default", "description"), rows))
        if shared := [f"`{option.flag}`" for option in options if option not in own]:
            parts.append(f"As in training: {', '.join(shared)}.\n")
    return "\n".join(parts)


def metrics_table() -> str:
    """The registry of metrics."""
    return table(("key", "unit", "mean over", "meaning"),
                 ([f"`{metric.key}`", metric.unit, metric.per, metric.meaning] for metric in METRICS.values()))


def trl_table() -> str:
    """What each field of TRL's config classes is here; one row for each description."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for method, kind in CONFIGS.items():
        for name, entry in fields_of(method).items():
            if name in kind.__dataclass_fields__:
                found.setdefault((name, entry.fate, entry.text), []).append(kind.__name__)
    rows = [[f"`{name}`" + (f" ({', '.join(names)})" if len(names) < len(CONFIGS) else ""), fate, text]
            for (name, fate, text), names in found.items()]
    return table(("field", "fate", "here"), sorted(rows))


def names_table(trainer: str) -> str:
    """What each name of a published trainer is here, with the classes, scripts or files that take it."""
    options = {option for cls in METHODS.values() for option in cls.flat_fields()}
    arguments = {*inspect.signature(Trainer.__init__).parameters}
    parts = []
    for classes in (False, True):
        groups = {group: names.split() for group, names in PUBLISHED[trainer].items()
                  if classes == group.endswith("Trainer")}
        rows = []
        for name in dict.fromkeys(name for names in groups.values() for name in names):
            found = answer(name, options | arguments if classes else options, trainer)
            assert found is not None, name
            taken = found.option if classes else f"--{found.option.replace('_', '-')}"
            here = found.text or f"`{taken}`"
            where = [group for group, names in groups.items() if name in names]
            rows.append([f"`{name}`", *([", ".join(where)] if len(groups) > 1 else []), found.kind, here])
        if rows:
            parts.append(table(("argument" if classes else "option", *(["of"] if len(groups) > 1 else []), "", "here"),
                               rows))
    return "\n".join(parts)


def _make(name: str) -> str:
    makers: dict[str, Callable[[], str]] = {
        **{f"options {heading}": lambda heading=heading: options_table(heading) for heading in HEADINGS},
        **{f"losses {method}": lambda method=method: losses_table(method) for method in ("kto", "dpo")},
        **{f"commands {command.group}": lambda group=command.group: commands_table(group)
           for command in COMMANDS.values()},
        **{f"names {trainer}": lambda trainer=trainer: names_table(trainer) for trainer in PUBLISHED},
        "metrics": metrics_table, "trl fields": trl_table}
    return makers[name]()


def generated(text: str) -> str:
    """A document with its tables made anew."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{_make(block[2]).strip()}\n\n{block[3]}", text)


def main() -> int:
    """Write the tables, or check them. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with code 1 if a table is stale")
    check = parser.parse_args().check
    stale = []
    for file in (DOCS / name for name in FILES):
        text = file.read_text(encoding="utf-8")
        made = generated(text)
        if made == text:
            continue
        stale.append(file)
        if not check:
            file.write_text(made, encoding="utf-8")
    for file in stale:
        state = "stale. Run python tools/make_reference.py" if check else "written"
        print(f"{file.relative_to(DOCS.parent)}: {state}")
    return int(bool(stale) and check)


if __name__ == "__main__":
    sys.exit(main())
