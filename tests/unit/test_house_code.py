"""No file that Tropism reads may run code: the calls that could do so are not in the source, or are restricted."""

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import tropism

SOURCE = Path(tropism.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
UNPICKLES = {"data/tokenization/encode.py": 3}
"""Calls that unpickle, by file: worker processes and their parent exchange pickles through pipes."""

NEVER = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.startfile", "runpy.run_path",
         "runpy.run_module", "subprocess.getoutput", "subprocess.getstatusoutput", "pickle.Unpickler", "shelve.open",
         "marshal.load", "marshal.loads", "joblib.load", "dill.load", "dill.loads", "cloudpickle.load",
         "cloudpickle.loads", "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "torch.hub.load",
         "torch.jit.load", "torch.package.PackageImporter", "np.fromfile", "pd.read_pickle", "dcp.FileSystemReader",
         "tempfile.mktemp"}
RESTRICTED = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False),
              "numpy.load": ("allow_pickle", False)}
FROM = {"pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle", "yaml", "numpy", "subprocess", "os"}
"""Modules whose functions are called by their full names, so that this test sees them."""
_LOADERS = ("AutoTokenizer.from_pretrained", "AutoConfig.from_pretrained", "AutoModelForCausalLM.from_pretrained",
            "AutoModelForCausalLM.from_config", "AutoProcessor.from_pretrained")


def offenses(text: str) -> list[str]:
    """Calls in some code that may run what a file says."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module in FROM:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found += sorted(names & (NEVER | RESTRICTED.keys() | {"pickle.load", "pickle.loads"}))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in NEVER:
            found.append(ast.unparse(node))
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in NEVER and "." not in name:
            found.append(name)
        if name in ("pickle.load", "pickle.loads"):
            found.append("pickle")
        if name in RESTRICTED and given.get(RESTRICTED[name][0]) != str(RESTRICTED[name][1]):
            found.append(name)
        if name in _LOADERS and "trust_remote_code" not in given:
            found.append(name)
        if "shell" in given and name != "app.generate_completion":  # which names a shell and starts none
            found.append("shell")
        if given.get("weights_only") == "False" or given.get("allow_pickle") == "True":
            found.append(name)
        if name == "dcp.load" and "storage_reader" not in given:
            found.append(name)
    return found


def test_the_source_has_no_such_call() -> None:
    """The exceptions are counted, so that a new one is a decision."""
    found = {file.relative_to(SOURCE).as_posix(): Counter(offenses(file.read_text(encoding="utf-8"))) for file in FILES}
    assert {file: dict(calls) for file, calls in found.items() if calls} == {
        file: {"pickle": count} for file, count in UNPICKLES.items()}


@pytest.mark.parametrize("code", [
    "eval(x)", "exec(x)", "__import__(x)", "os.system(x)", "pickle.load(x)", "pickle.loads(x)", "call = os.system",
    "class A(pickle.Unpickler): pass", "from pickle import loads", "from yaml import load", "yaml.load(x, Loader=y)",
    "torch.load(x)", "torch.load(x, weights_only=False)", "torch.load(x, weights_only=y)", "np.load(x)",
    "np.load(x, allow_pickle=True)", "subprocess.run(x, shell=True)", "subprocess.Popen(x, shell=y)",
    "AutoConfig.from_pretrained(x)", "dcp.load(x)", "dcp.FileSystemReader(x)", "marshal.loads(x)"])
def test_such_calls_are_seen(code: str) -> None:
    assert offenses(code)


def test_bandit_rules_are_on() -> None:
    """ruff's rules S, over all of the source; each exception is one line with its reason."""
    root = SOURCE.parents[1]
    lint = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    assert "S" in lint["select"]
    assert [rule for rule in lint["ignore"] if rule.startswith("S")] == ["S101"]
    assert not [place for place in lint["per-file-ignores"] if place.startswith("src")]
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "--select", "S102,S301,S307,S506,S602,S605",
                           "--ignore-noqa", "--output-format", "concise", "src"], cwd=root, capture_output=True,
                          text=True, check=False)
    places = [line.partition(":")[0] for line in done.stdout.splitlines() if ": S" in line]
    assert Counter(places) == {f"src/tropism/{file}": count for file, count in UNPICKLES.items()}
