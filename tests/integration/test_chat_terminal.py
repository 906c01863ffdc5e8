"""`tropism chat` in a pseudo-terminal, as a person uses it."""

import fcntl
import json
import os
import pty
import select
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hostile import STYLING
from processes import fork_server
from tropism.cli.app import main

CTRL_C, CTRL_D = "\x03", "\x04"


def _child(name: str, argv: list[str], pause_s: float) -> None:
    """The command line at a terminal of its own, with a pause before each token."""
    torch.set_num_threads(1)
    os.setsid()
    terminal = os.open(name, os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(terminal, number)
    sys.stdin, sys.stdout = (open(number, mode, closefd=False) for number, mode in enumerate("rw"))  # noqa: SIM115
    os.environ["TERM"] = "xterm"
    from tropism.commands.chat import speaker

    real = speaker._Halt.__call__
    speaker._Halt.__call__ = lambda *args, **options: time.sleep(pause_s) or real(*args, **options)  # type: ignore
    sys.exit(main(argv))


class Terminal:
    """A chat in a process of a fork server, and what its terminal shows."""

    def __init__(self, *argv: Any, pause_s: float = 0.0) -> None:
        self.master, slave = pty.openpty()
        command = ["chat", *map(str, argv)]
        self.process = fork_server().Process(target=_child, args=(os.ttyname(slave), command, pause_s))
        self.process.start()
        self._slave, self.shown, self._read = slave, "", 0

    def until(self, text: str) -> str:
        """Wait for a text; what was shown since the last one, up to its end."""
        end = time.monotonic() + 60
        while text not in self.shown[self._read:]:
            assert time.monotonic() < end, self.shown
            assert self.process.is_alive() or select.select([self.master], [], [], 0)[0], self.shown
            if select.select([self.master], [], [], 0.1)[0]:
                self.shown += STYLING.sub("", os.read(self.master, 4096).decode()).replace("\r\n", "\n")
        start, self._read = self._read, self.shown.index(text, self._read) + len(text)
        return self.shown[start : self._read]

    def type(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def end(self) -> int | None:
        self.process.join(60)
        return self.process.exitcode

    def close(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        for number in (self.master, self._slave):
            with suppress(OSError):
                os.close(number)


@pytest.fixture
def opened() -> Iterator[list[Terminal]]:
    """Terminals to close."""
    found: list[Terminal] = []
    yield found
    for terminal in found:
        terminal.close()


def test_ctrl_c_stops_an_answer_and_keeps_the_session(opened: list[Terminal], tiny_model_dir: Path,
                                                      tmp_path: Path) -> None:
    """The part that was written stays; at the prompt Ctrl-D leaves, with what to do next. Also twice at once."""
    file = tmp_path / "f.jsonl"
    opened.append(chat := Terminal(tiny_model_dir, "--plain-text", "--feedback", file, pause_s=0.05))
    started = chat.until("\n> ")
    assert "/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves." in started
    chat.type("sea sky\n")
    chat.until("yyyy")
    chat.type(CTRL_C)
    assert "(stopped)" in chat.until("\n> ")
    chat.type("/bad\n")
    assert "added to" in chat.until("\n> ")
    row = json.loads(file.read_text())
    assert (row["prompt"], row["label"]) == ("sea sky", False)
    assert 4 <= len(row["completion"]) < 400
    chat.type("fig\n")
    chat.until("gggg")
    chat.type(CTRL_C + CTRL_C)
    chat.until("\n> ")
    chat.type("/nothing\n")
    assert "error: unknown command /nothing" in chat.until("\n> ")
    chat.type(CTRL_D)
    assert "tropism kto --model" in chat.until("--output RUN")
    assert chat.end() == 0


def test_ctrl_c_at_the_prompt_leaves(opened: list[Terminal], tiny_model_dir: Path) -> None:
    """Nothing is left to say. The choice of a blind comparison is shown before."""
    opened.append(chat := Terminal(tiny_model_dir, "--compare", tiny_model_dir, "--blind", "--max-new-tokens", 3))
    chat.until("\n> ")
    chat.type("sea\n")
    assert "A:\n" in (said := chat.until("\n> "))
    assert "B:\n" in said
    chat.type("/b\n")
    assert "A was " in chat.until("\n> ")
    chat.type(CTRL_C)
    chat.until("choices: ")
    assert chat.end() == 0
    assert "Traceback" not in chat.shown
