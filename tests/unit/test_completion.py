"""`--install-completion` and `--show-completion`: the script completes in a real shell."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tropism.cli import completion
from tropism.cli.app import main


@pytest.fixture(scope="module")
def bash_script() -> str:
    """The script, printed without torch, and as it is also if the log is JSON."""
    code = ("import sys; from tropism.cli.app import main; from tropism.cli.commands import app\n"
            "assert main(['--show-completion', 'bash']) == 0\n"
            "assert not {'torch', 'transformers'} & {name.split('.')[0] for name in sys.modules}\n"
            "assert app.help_flags == ()")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "TROPISM_LOG_FORMAT": "json", "TROPISM_QUIET": "1"})
    return done.stdout


_ASK = """source {script}
COMP_WORDS=({words}); COMP_CWORD={last}; _tropism
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("line", "found"), [
    ("tropism ver", ["verify"]), ("tropism kto --bet", ["--beta"]), ("tropism store cl", ["clean"]),
    ("tropism dpo --model m --lora.ra", ["--lora.rank"]), ("tropism kto --precision b", ["bf16"]),
    ("tropism doctor --qu", ["--quiet"]), ("tropism export --log-f", ["--log-format"]),
    ("tropism --inst", ["--install-completion"]), ("tropism kto --nothing", [""])])
def test_bash_completes(line: str, found: list[str], bash_script: str, tmp_path: Path) -> None:
    words = line.split()
    file = tmp_path / "tropism"
    file.write_text(bash_script)
    asked = _ASK.format(script=file, words=" ".join(words), last=len(words) - 1)
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert (done.stdout.splitlines(), done.stderr) == (found, "")
    assert "complete -o default -F _tropism tropism" in bash_script  # names of files for --data


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_it_is_installed_once(shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(completion, "script", lambda shell: f"script of {shell}")
    monkeypatch.setattr(completion, "detect_shell", lambda: shell)
    (tmp_path / ".bashrc").write_text("alias a=b\n")
    for options in (["--install-completion"], ["--install-completion", shell], [f"--install-completion={shell}"]):
        assert main(options) == 0
    said = capsys.readouterr().out
    path = Path(said.split("\n")[0].removeprefix(f"completion for {shell}: "))
    assert path.read_text() == f"script of {shell}"
    lines = (tmp_path / ".bashrc").read_text().splitlines()
    assert lines[0] == "alias a=b"
    assert sum("tropism" in line and not line.startswith("#") for line in lines) == (shell == "bash")
    assert said.count("added to") == (shell == "bash")


def test_an_unknown_shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def lost() -> str:
        raise completion.ShellDetectionError

    monkeypatch.setattr(completion, "detect_shell", lost)
    for tokens, said in (
            (["--show-completion", "tcsh"], "--show-completion: tcsh is not one of bash, zsh, fish"),
            (["--show-completion", "bash", "x"], "--show-completion: bash x is not one of bash, zsh, fish"),
            (["--install-completion"], "--install-completion: the shell is unknown. Name it: --install-completion "
                                       "bash|zsh|fish")):
        assert main(tokens) == 2
        assert capsys.readouterr().err == f"tropism: {said}\n"
