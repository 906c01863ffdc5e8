"""The pages in docs/coming-from: their commands are translated, their configurations give what they show, and their
Python calls what exists."""

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest

from tropism.cli.app import main
from tropism.commands.migrate import TRAINERS, migrate
from tropism.commands.migrate.report import command

PAGES = Path(__file__).parents[2] / "docs" / "coming-from"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def blocks(kind: str) -> list[tuple[str, str]]:
    return [(page.name, text) for page in sorted(PAGES.glob("*.md")) if page.name != "trl.md"
            for found, text in BLOCK.findall(page.read_text(encoding="utf-8")) if found == kind]


@pytest.mark.parametrize(("page", "text"), blocks("console"))
def test_commands(page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name, config in blocks("yaml"):
        if name == page:
            Path("train.yaml").write_text(config)
    for line in text.splitlines():
        assert main(shlex.split(line)[1:]) == 0
        assert capsys.readouterr().out.startswith(("tropism ", "torchrun "))


@pytest.mark.parametrize(("page", "text"), blocks("yaml"))
def test_configurations(page: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the page is what the configuration on the page becomes."""
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text(text)
    run = migrate(page.removesuffix(".md").replace("llama-factory", "llamafactory"), ["train.yaml"])
    wanted = next(shown for name, shown in blocks("bash") if name == page)
    assert "\n".join(command(run)) == wanted.strip()


@pytest.mark.parametrize(("page", "text"), blocks("python"))
def test_calls(page: str, text: str) -> None:
    """Constructors and methods take what the page passes."""
    tree = ast.parse(text)
    names: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            module = pytest.importorskip(str(node.module), reason=f"{node.module} is not there")
            names |= {alias.name: getattr(module, alias.name) for alias in node.names}
    made = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            called = names[node.func.id]
            made["trainer"] = called
        else:
            assert isinstance(node.func, ast.Attribute)
            called = getattr(made["trainer"], node.func.attr)
        signature = inspect.signature(called)  # type: ignore[arg-type]
        arguments = [None, *node.args] if isinstance(node.func, ast.Attribute) else node.args
        signature.bind(*arguments, **{str(keyword.arg): None for keyword in node.keywords})


def test_the_index_names_every_trainer() -> None:
    text = (PAGES / "index.md").read_text(encoding="utf-8")
    assert not [name for name in TRAINERS if f"| `{name}` |" not in text]
