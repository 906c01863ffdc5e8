"""G2: a chat template that does not end, or takes all memory, is ended with a sentence that names the row."""

import io
import json
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import build_tokenizer, chat
from tropism.cli.app import main
from tropism.data.tokenization import apply_template, template_limits
from tropism.data.tokenization.encode import _receive, _send, _serve
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError

ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops without calls": "{% set r = range(99999)|list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "loops over messages": "{% for a in messages %}{% for i in range(99999) %}{% for j in range(99999) %}{{ a.role }}"
                           "{% endfor %}{% endfor %}{% endfor %}",
    "macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "filter": "{{ lipsum(n=99999, min=1000, max=2000) }}"}
LARGE = {
    "text": "{{ 'a' * 10**11 }}", "padding": "{{ 'a'|center(10**11) }}", "format": "{{ '%99999999999d' % 1 }}",
    "str.format": "{{ '{:99999999999}'.format(1) }}", "list": "{{ range(99999)|list * 9999999 }}",
    "replace": "{{ ('a' * 10**6)|replace('a', 'b' * 10**6)|length }}", "indent": "{{ 'a'|indent(10**11) }}"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_template, "TEMPLATE_S", 0.2)
    monkeypatch.setattr(template_limits, "_AGAIN_S", 0.2)


def renderer_of(template: str) -> Renderer:
    return Renderer(build_tokenizer(chat_template=template), Limits(200, 100),
                    template_name="the chat template odd.jinja")


def refused(template: str) -> str:
    before = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGALRM)
    began = time.monotonic()
    with pytest.raises(DataError) as error:
        renderer_of(template).encode(chat("why", answers=("so",)))
    assert time.monotonic() - began < 5
    assert before == (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGALRM))
    return str(error.value)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end(name: str, quick: None) -> None:
    assert refused(ENDLESS[name]) == ("f:1: the chat template odd.jinja did not end within 0.2 s. Fix the template, or "
                                      "choose another with --chat-template.")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_power_without_end(quick: None) -> None:
    """One operation of Python, which is also tried when the template is compiled."""
    assert "did not end within" in refused("{{ 9**(9**9) }}")


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_takes_all_memory(name: str) -> None:
    assert "the chat template odd.jinja needs more than 2 GiB of memory. Fix" in refused(LARGE[name])


def test_text_that_no_tokenizer_should_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply_template, "TEMPLATE_CHARACTERS", 10**6)
    assert "renders 2,000,000 characters, more than 1,000,000. Fix" in refused("{{ 'a' * (2 * 10**6) }}")


def in_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    return found[0]


@pytest.mark.parametrize("name", ENDLESS)
def test_in_a_thread(name: str, quick: None) -> None:
    """Threads get no signals."""
    error = in_thread(lambda: renderer_of(ENDLESS[name]).encode(chat("why", answers=("so",))))
    assert isinstance(error, DataError), error
    assert "did not end within 0.2 s" in str(error)


def test_rows_in_a_thread_are_the_same() -> None:
    row = chat("why", answers=("so",))
    wanted = Renderer(build_tokenizer(), Limits(200, 100)).encode(row)
    assert repr(in_thread(lambda: Renderer(build_tokenizer(), Limits(200, 100)).encode(row))) == repr(wanted)


def test_a_timer_of_the_caller_stays(quick: None) -> None:
    """Such as that of a test runner: it rings as it would have."""
    rung: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert "did not end within" in refused(ENDLESS["loops"])
        assert rung == [signal.SIGALRM]
        signal.setitimer(signal.ITIMER_REAL, 100)
        Renderer(build_tokenizer(), Limits(200, 100)).encode(chat("why", answers=("so",)))
        assert 90 < signal.getitimer(signal.ITIMER_REAL)[0] <= 100
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_lower_limit_of_the_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []
    monkeypatch.setattr(template_limits.resource, "setrlimit", lambda kind, both: limits.append(both[0]))
    monkeypatch.setattr(template_limits.resource, "getrlimit", lambda kind: (5000, resource.RLIM_INFINITY))
    assert template_limits.limited(lambda: 3, 10.0, 2**31) == 3
    assert limits == [5000, 5000]


def test_in_a_worker_process(quick: None) -> None:
    """The parent gets the same error."""
    requests, replies = io.BytesIO(), io.BytesIO()
    _send(requests, pickle.dumps(renderer_of(ENDLESS["loops"])))
    _send(requests, pickle.dumps(([chat("why", answers=("so",))], None)))
    requests.seek(0)
    _serve(requests, replies)
    replies.seek(0)
    error = pickle.loads(_receive(replies) or b"")
    assert isinstance(error, DataError)
    assert "f:1: the chat template odd.jinja did not end within 0.2 s" in str(error)


def test_the_command_names_template_and_row(tiny_model_dir: Path, tmp_path: Path, quick: None,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    template, data = tmp_path / "hung.jinja", tmp_path / "rows.jsonl"
    template.write_text("{{ messages[0].content }}" + ENDLESS["loops"])
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}))
    assert main(["inspect", str(data), "--model", str(tiny_model_dir), "--chat-template", str(template)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"rows.jsonl:1: the chat template {template} did not end within 0.2 s." in said


def test_a_template_of_deep_expressions(tiny_model_dir: Path, tmp_path: Path,
                                        capsys: pytest.CaptureFixture[str]) -> None:
    template, data = tmp_path / "deep.jinja", tmp_path / "rows.jsonl"
    template.write_text("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}")
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}))
    assert main(["inspect", str(data), "--model", str(tiny_model_dir), "--chat-template", str(template)]) == 2
    assert "nested too deeply" in capsys.readouterr().err
