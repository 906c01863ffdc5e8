"""The table of names that published trainers take: every one is taken, or answered with what to do."""

import inspect
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from tropism import DPOTrainer, KDTrainer, KTOTrainer
from tropism.argument_names import ALIASES, PUBLISHED, answer, explained, instead, published
from tropism.argument_names.aliases import TYPED
from tropism.cli.app import main
from tropism.config import METHODS

FROZEN = yaml.safe_load((Path(__file__).parents[1] / "cases" / "published_names.yaml").read_text(encoding="utf-8"))
OPTIONS = {name for options in METHODS.values() for name in options.flat_fields()}
ARGUMENTS = set(inspect.signature(KTOTrainer.__init__).parameters) - {"self", "options"}
GROUPS = [(trainer, group) for trainer, groups in FROZEN.items() for group in groups]
KINDS = ("taken", "replaced", "without effect", "not supported")


def names(trainer: str, group: str) -> list[str]:
    return list(FROZEN[trainer][group]["names"].split())


def texts() -> dict[str, str]:
    """Every line of the table by a name that it answers."""
    own = {f"{trainer} {name}": text for trainer, entries in published.OWN.items()
           for name, (_, text) in entries.items()}
    return {**{name: text for name, (_, text) in explained.EXPLAINED.items()}, **own}


@pytest.mark.parametrize(("trainer", "group"), GROUPS)
def test_the_table_has_exactly_the_published_names(trainer: str, group: str) -> None:
    found = names(trainer, group)
    assert len(found) == len({*found}) == FROZEN[trainer][group]["count"]
    assert PUBLISHED[trainer][group].split() == found
    assert PUBLISHED.keys() == FROZEN.keys()
    assert PUBLISHED[trainer].keys() == FROZEN[trainer].keys()


@pytest.mark.parametrize(("trainer", "group"), GROUPS)
def test_every_published_name_is_taken_or_answered(trainer: str, group: str) -> None:
    known = OPTIONS | ARGUMENTS if group.endswith("Trainer") else OPTIONS
    for name in names(trainer, group):
        found = answer(name, known, trainer)
        assert found is not None, name
        assert found.kind in KINDS
        assert (found.option in known and not found.text) if found.kind == "taken" else len(found.text) > 20, name


@pytest.mark.parametrize("name", sorted({name for trainer, group in GROUPS if group.startswith("train_")
                                         for name in names(trainer, group)}))
def test_an_error_has_the_line_of_the_table(name: str) -> None:
    """On our command line a name is an option, is replaced, or is answered: never left with the nearest name."""
    said = instead(name, OPTIONS, "--{}")
    assert name in OPTIONS or name in TYPED or said == explained.EXPLAINED[name][1]


@pytest.mark.parametrize(("trainer", "name"), [
    (KTOTrainer, name) for name in names("openrlhf", "KTOTrainer") + names("coati", "KTOTrainer")
    + names("nemo-aligner", "KTOTrainer")] + [(DPOTrainer, name) for name in names("openrlhf", "DPOTrainer")]
    + [(KDTrainer, name) for name in names("openrlhf", "KDTrainer")])
def test_constructors_take_or_answer_each_argument(trainer: type, name: str) -> None:
    taken = {*trainer.options_class.flat_fields(), *ARGUMENTS, *ALIASES,  # type: ignore[attr-defined]
             "actor", "optim", "actor_optim", "actor_lr_scheduler"}
    if name not in taken:
        assert answer(name, taken).text.endswith(".")  # type: ignore[union-attr]


def test_lines_are_sentences_and_name_what_exists() -> None:
    """An option in a line is an option; a command is a command."""
    for name, text in texts().items():
        assert re.match(r"[A-Z-]|tropism|torchrun", text), name
        assert text.endswith((".", "...")), name
        for flag in re.findall(r"--([a-z][\w.-]*[a-z])", text):
            assert flag.replace("-", "_") in OPTIONS | {"to", "nproc_per_node", "config"}, (name, flag)
        for command in re.findall(r"tropism (\w+)", text):
            assert command in (*METHODS, "export", "verify", "evaluate", "inspect", "train"), (name, command)


def test_no_name_is_answered_twice() -> None:
    """Neither by two lines nor by a line and one of our names."""
    every = Counter(name for group in (explained._REPLACED, explained._WITHOUT_EFFECT, explained._UNSUPPORTED)
                    for entry in group for name in entry.split())
    assert not [name for name, count in every.items() if count > 1]
    assert not every.keys() & {*TYPED}
    assert not every.keys() & OPTIONS


@pytest.mark.parametrize(("name", "kind", "option"), [
    ("trainer.kto.max_epochs", "taken", "epochs"), ("model.beta", "taken", "beta"), ("ds.zero-stage", "replaced", ""),
    ("MODEL.OPTIM.LR", "taken", "learning_rate"), ("model.kto.sft_loss_weight", "without effect", ""),
    ("adam.betas", "not supported", "")])
def test_the_end_of_a_dotted_name_counts(name: str, kind: str, option: str) -> None:
    found = answer(name, OPTIONS)
    assert found is not None
    assert (found.kind, found.option) == (kind, option)


def test_names_of_one_trainer_mean_something_else_at_another() -> None:
    assert answer("batch_size", OPTIONS).option == "batch_size"  # type: ignore[union-attr]
    assert answer("batch_size", OPTIONS, "coati").kind == "replaced"  # type: ignore[union-attr]
    assert answer("zzz", OPTIONS, "coati") is None


def test_the_command_line_answers(capsys: pytest.CaptureFixture[str]) -> None:
    for option, said in (("--ring_attn_size", "A sequence is not divided over processes."),
                         ("--model.nll_loss_coef", "--loss sigmoid,sft"), ("--use_ms", "Download model and data")):
        assert main(["dpo", "--model", "m", "--data", "d", "--output", "o", option, "2"]) == 2
        assert f"unknown option {option}. {said}" in capsys.readouterr().err
