"""`tropism chat` with lines from a file or pipe: answers, feedback that trains, and what is refused."""

import io
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from exporting import filled_run
from helpers import CHATML, build_tokenizer, tokenizer_kinds
from tropism.cli.app import main
from tropism.commands.export import export
from tropism.model import load

LORA = ["--lora.rank", "4", "--learning-rate", "1e-2"]


class Talking:
    """Calls of `tropism chat` with the tiny model, and what they printed.

    Args:
        path: an empty directory.
        model: that answers if no other is named.
    """

    def __init__(self, path: Path, model: Path, monkeypatch: pytest.MonkeyPatch,
                 capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self.model, self.monkeypatch, self.capsys = path, model, monkeypatch, capsys
        self.out = self.err = ""

    def __call__(self, lines: str, *options: Any, model: Any = None, code: int = 0, most: int = 12) -> list[str]:
        """Chat, and return the lines of the answers."""
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode("utf-8", "surrogateescape"))))
        self.capsys.readouterr()
        tokens = ["chat", model or self.model, "--max-new-tokens", most, *options]
        found = main(list(map(str, tokens)))
        self.out, self.err = self.capsys.readouterr()
        assert found == code, self.err
        return self.out.splitlines()

    def copy(self, name: str, **tokenizer: Any) -> Path:
        """A copy of the model with another tokenizer; arguments as in `build_tokenizer`."""
        path = self.path / name
        path.mkdir()
        for file in self.model.iterdir():
            if file.name not in ("chat_template.jinja",) and not file.name.startswith("tokenizer"):
                (path / file.name).symlink_to(file)
        build_tokenizer(**tokenizer).save_pretrained(path)
        return path


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory, fixture_tokenizer: Any) -> Path:
    """A random model that writes letters; the one with a tied head would repeat its last token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=102, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, tie_word_embeddings=False, initializer_range=0.3, bos_token_id=0, eos_token_id=1))
    with torch.no_grad():
        model.lm_head.weight[[0, 1, 2, 3, 5, 6, 101]] = 0  # neither control tokens nor white space
    path = tmp_path_factory.mktemp("models") / "talker"
    model.save_pretrained(path)
    fixture_tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def talk(tmp_path: Path, talker: Path, monkeypatch: pytest.MonkeyPatch,
         capsys: pytest.CaptureFixture[str]) -> Talking:
    return Talking(tmp_path, talker, monkeypatch, capsys)


def generated(model: Path, messages: list[dict[str, str]] | str, most: int = 12) -> str:
    """What transformers generates greedily, with the chat template, up to its usual terminators."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = (tokenizer(messages, return_tensors="pt") if isinstance(messages, str) else tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt"))["input_ids"]
    found = module.generate(ids, max_new_tokens=most, do_sample=False, eos_token_id=[1, 4], pad_token_id=1)
    text = tokenizer.decode(found[0, ids.shape[1]:], skip_special_tokens=True)
    return text if isinstance(messages, str) else text.strip()


def said(*texts: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_script_gets_the_answers_of_the_model_and_nothing_else(talk: Talking) -> None:
    """Through the template, with all turns before; the same text that transformers generates. Notes are elsewhere."""
    talk("sea sky\n\nfig?\n")
    first = generated(talk.model, said("sea sky"))
    second = generated(talk.model, said("sea sky", first, "fig?"))
    assert first != second
    assert talk.out == f"{first}\n{second}\n"
    assert "loading model" in talk.err
    assert "greedy decoding (temperature 0), at most 12 tokens, stop at <|eos|> <|end|>" in talk.err


def test_commands_of_a_conversation(talk: Talking) -> None:
    """/reset forgets, /system stays, /retry asks the same again, and /quit leaves the rest unread."""
    talk("fig?\n/reset\nsea sky\n/retry\n/system oak elm\n/reset\nsea sky\n/quit\nsun\n")
    first, again = generated(talk.model, said("fig?")), generated(talk.model, said("sea sky"))
    with_system = generated(talk.model, [{"role": "system", "content": "oak elm"}, *said("sea sky")])
    assert talk.out == "\n".join([first, again, again, with_system, ""])
    assert "At temperature 0 the answer stays the same" in talk.err
    assert talk("sea sky\n", "--system-prompt", "oak elm") == with_system.splitlines()


def test_sampling_repeats_with_its_seed(talk: Talking) -> None:
    one, same, other = (talk("sea\n/retry\n", "--temperature", 0.9, "--top-p", 0.9, "--seed", seed, most=30)
                        for seed in (3, 3, 4))
    assert one == same != other
    half = len(talk.out) // 2
    assert talk.out[:half] != talk.out[half:]  # /retry samples anew
    talk("/temperature 0\nsea\n", "--temperature", 5)
    assert talk.out == generated(talk.model, said("sea")) + "\n"


def test_a_model_without_a_template_continues_text(talk: Talking) -> None:
    """Each line alone, told once; the rows are plain text and decode exactly."""
    bare = talk.copy("bare", chat_template=None)
    file = talk.path / "f.jsonl"
    talk("sea \n/good\noak\n/bad\n", "--feedback", file, model=bare)
    texts = [generated(bare, text) for text in ("sea", "oak")]
    assert talk.out == "".join(f"{text}\n" for text in texts)
    assert talk.err.count("has no chat template") == 1
    assert rows(file) == [{"prompt": "sea", "completion": texts[0], "label": True},
                          {"prompt": "oak", "completion": texts[1], "label": False}]
    assert talk("sea\n", "--plain-text") == texts[0].splitlines()
    talk("sea\n", "--system-prompt", "x", model=bare, code=2)
    assert "Choose one with --chat-template" in talk.err


def test_the_oldest_turns_are_dropped_when_the_positions_end(talk: Talking) -> None:
    """512 positions: said, and answered as if the conversation began later. A question that is too long is refused, and
    changes nothing."""
    long = "oak elm ash fir " * 10
    talk(f"{long}\n{long}\n{long}\nfig?\n", "--feedback", talk.path / "f.jsonl", most=40)
    assert "dropped 1 turn from the start of the conversation: it no longer fits into the model's 512 " in talk.err
    talk("x" * 600 + "\n", code=2)
    assert "standard input:1: the prompt has 6" in talk.err
    assert "the model's 512 positions. Use a shorter text." in talk.err
    talk("x" * 480 + "\n", most=500)  # fewer tokens than asked for
    assert "where the model's positions end)" in talk.err


def test_a_row_has_the_prompt_that_the_model_was_given(talk: Talking) -> None:
    long, file = "oak elm ash fir " * 10, talk.path / "f.jsonl"
    talk(f"{long}\n{long}\n{long}\n/good\n", "--feedback", file, "--system-prompt", "be brief", most=40)
    (row,) = rows(file)
    assert row["prompt"][0] == {"role": "system", "content": "be brief"}
    assert [one["role"] for one in row["prompt"][1:]] == ["user", "assistant", "user"]
    assert generated(talk.model, row["prompt"], 40) == row["completion"][0]["content"]


def test_text_from_the_model_does_not_act_on_the_terminal(talk: Talking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Escape sequences of an answer are printed as data, and the row keeps them as they are."""
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_kinds()["byte level"], bos_token="<|bos|>",
                                        eos_token="<|eos|>", chat_template=CHATML)
    model, file = talk.copy("bytes"), talk.path / "f.jsonl"
    tokenizer.save_pretrained(model)
    hostile = "\x1b[2J\x1b]52;c;eA==\x07ok\rno\u202egnp \u65e5\u672c \U0001f469\u200d\U0001f4bb caf\u00e9\n\tx"

    def generate(self: Any, input_ids: torch.Tensor, streamer: Any, **options: Any) -> None:
        streamer.put(input_ids)
        for token in tokenizer(hostile)["input_ids"]:
            streamer.put(torch.tensor([token]))
        streamer.end()

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    monkeypatch.setattr("tropism.commands.chat.run.max_positions", lambda config: None)
    talk("\x1b[31mhi\n/good\n", "--feedback", file, model=model)
    assert talk.out == ("\\x1b[2J\\x1b]52;c;eA==\\x07ok\\rno\\u202egnp \u65e5\u672c \U0001f469\u200d\U0001f4bb "
                        "caf\u00e9\n        x\n")
    assert rows(file)[0]["completion"][0]["content"] == hostile
    assert "\x1b" not in talk.out + talk.err


# --- runs and comparisons ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, talker: Path, feedback: Path) -> Path:
    """A run that trained an adapter, with a template, values and a system message of its own."""
    run = tmp_path_factory.mktemp("runs") / "lora"
    assert main(["kto", "--model", str(talker), "--data", str(feedback), "--output", str(run), "--as-messages",
                 "--system-prompt", "oak elm", "--samples", "0", "--max-steps", "3", "--batch-size", "8",
                 "--store", str(run.parent / "store"), *LORA]) == 0
    return run


def test_a_run_answers_as_it_was_trained(talk: Talking, adapted: Path) -> None:
    """With its system message, and its adapter as merging would have it; another system message replaces its own."""
    merged = talk.path / "merged"
    export(adapted, merged, merge=True)
    messages = [{"role": "system", "content": "oak elm"}, *said("sea")]
    wanted = generated(merged, messages)
    assert wanted != generated(talk.model, messages)
    assert talk("sea\n", model=adapted) == wanted.splitlines() == talk("sea\n", model=adapted / "model")
    assert "system message: oak elm  (of the run)" in talk.err
    assert talk("sea\n", "--system-prompt", "fig", model=adapted) == generated(
        merged, [{"role": "system", "content": "fig"}, *said("sea")]).splitlines()


def test_a_run_and_its_base_share_the_weights(talk: Talking, adapted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded once, the adapter switched off for the base; each answers as it does alone, whichever is named first."""
    loaded: list[str] = []
    real = load.load_model
    monkeypatch.setattr(load, "load_model", lambda source, *rest, **more: loaded.append(source.name) or real(
        source, *rest, **more))
    alone = {name: "\n".join(talk("sea\nfig\n", "--system-prompt", "x", model=name)) for name in (adapted, talk.model)}
    loaded.clear()
    for names in ((adapted, talk.model), (talk.model, adapted)):
        talk("sea\n", "--compare", names[1], "--system-prompt", "x", model=names[0])
        first = [alone[name].split("\n")[0] for name in names]
        shown = [text.split("\n") for text in talk.out.removeprefix("A: ").split("\nB: ")]
        assert [(lines[0], lines[1]) for lines in shown] == list(zip(map(str, names), first, strict=True))
    assert len(loaded) == 2


def test_choices_become_pairs_and_the_conversation_continues_with_them(talk: Talking, adapted: Path) -> None:
    file = talk.path / "pairs.jsonl"
    talk("sea\n/b\nfig\n/a\noak\n/tie\n", "--compare", talk.model, "--feedback", file, "--system-prompt", "x",
         model=adapted)
    first, second = rows(file)
    base = generated(talk.model, [{"role": "system", "content": "x"}, *said("sea")])
    assert first["prompt"] == [{"role": "system", "content": "x"}, *said("sea")]
    assert first["chosen"] == [{"role": "assistant", "content": base}] != first["rejected"]
    assert second["prompt"] == [*first["prompt"], *first["chosen"], *said("fig")]
    assert f"choices: {talk.model} 1, {adapted} 1, tie 1" in talk.err
    assert "added 2 rows, 2 in total. Train on them: tropism dpo --model " in talk.err


def test_a_blind_choice_is_revealed_after_it(talk: Talking, adapted: Path) -> None:
    """Neither name before; both orders occur; the pair has what the chosen model said."""
    orders = set()
    file = talk.path / "pairs.jsonl"
    talk("sea\n/a\n/reset\n" * 12, "--compare", talk.model, "--blind", "--feedback", file, model=adapted, most=3)
    assert str(adapted) not in talk.out
    assert talk.out.count("A:\n") == talk.out.count("B:\n") == 12
    base = generated(talk.model, [{"role": "system", "content": "oak elm"}, *said("sea")], 3)
    revealed = [line for line in talk.err.splitlines() if line.startswith("A was ")]
    for line, row in zip(revealed, rows(file), strict=True):
        is_base = line == f"A was {talk.model}, B was {adapted}"
        assert is_base or line == f"A was {adapted}, B was {talk.model}"
        assert (row["chosen"][0]["content"] == base) is is_base
        orders.add(is_base)
    assert orders == {True, False}


def test_equal_answers_make_no_pair(talk: Talking) -> None:
    file = talk.path / "pairs.jsonl"
    talk("sea\n/a\n", "--compare", talk.model, "--feedback", file)
    assert "the answers are equal, so no row was added" in talk.err
    assert not file.exists()


def test_a_base_without_a_template_gets_that_of_the_run(talk: Talking) -> None:
    bare = talk.copy("bare", chat_template=None)
    lines = talk("sea\n", "--compare", bare)
    assert f"{bare} has no chat template. It gets that of {talk.model}." in talk.err
    assert lines[1] == generated(talk.model, said("sea")).split("\n")[0] == lines[lines.index(f"B: {bare}") + 1]


def test_a_run_without_a_model_is_refused(talk: Talking) -> None:
    """Also as the one that is compared with, with what to do."""
    run = filled_run(talk.path / "run", talk.model)
    for options in ({"model": run}, {}):
        talk("sea\n", *([] if options else ["--compare", run]), **options, code=2)
        assert f"{run}: the run has no trained model yet (status: done). Finish it with `tropism resume" in talk.err


# --- feedback ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_the_file_trains_a_run(talk: Talking, adapted: Path, method: str) -> None:
    """The loop closes: no row is dropped, and the command that is printed at the end works."""
    file = talk.path / "rows.jsonl"
    answers = {"kto": ("/good", "/bad"), "dpo": ("/a", "/b")}[method]
    talk("".join(f"{word}\n{answers[n % 2]}\n" for n, word in enumerate(["sea sky", "fig", "oak", "sun"])),
         "--feedback", file, *(["--compare", talk.model] if method == "dpo" else []), model=adapted, most=30)
    command = talk.err.rpartition("Train on them: tropism ")[2].split()
    assert command[:2] == [method, "--model"]
    command[command.index("RUN")] = str(talk.path / "run")
    assert main([*command, "--samples", "0", "--max-steps", "1", "--store", str(talk.path / "store")]) == 0
    run = talk.path / "run"
    assert (f"next:\n  tropism report {run}\n  tropism chat {run} --compare {adapted}/model\n"
            in talk.capsys.readouterr().out)
    audit = json.loads((talk.path / "run" / "audit.json").read_text())
    assert audit["rows"]["read"] == audit["rows"]["kept"] == 4
    if method == "kto":
        assert (audit["labels"]["desirable"], audit["labels"]["undesirable"]) == (2, 2)


def test_rows_are_appended_to_a_file_of_their_kind(talk: Talking) -> None:
    """Also behind a last line without its end. An answer is judged once."""
    file = talk.path / "f.jsonl"
    file.write_text('{"prompt": "a", "completion": "b", "label": true}', encoding="utf-8")
    talk("sea\n/bad\n", "--feedback", file)
    assert [row["label"] for row in rows(file)] == [True, False]
    assert "added 1 row, 2 in total" in talk.err
    talk("sea\n/bad\n/good\n", "--feedback", file, code=2)
    assert "standard input:3: you have judged this answer already" in talk.err
    assert len(rows(file)) == 3


@pytest.mark.parametrize(("line", "wanted"), [
    ("/good", "there is no answer yet"), ("/a", "unknown command /a."), ("/rest", "Did you mean /reset?"),
    ("/temperature hot", "'hot' is not a temperature"), ("/temperature 0.001", "from 0.01 to 100"),
    ("/retry", "there is no answer yet"), ("a\udcffb", "not UTF-8"), (" ", "")])
def test_lines_that_do_nothing(talk: Talking, line: str, wanted: str) -> None:
    talk(f"{line}\n", "--feedback", talk.path / "f.jsonl", code=2 if wanted else 0)
    assert wanted in talk.err
    assert "Traceback" not in talk.err
    assert not (talk.path / "f.jsonl").exists()


def test_a_template_that_refuses_a_system_message(talk: Talking) -> None:
    strict = talk.copy("strict", chat_template="{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}"
                       "{% endif %}" + CHATML)
    talk("/system be brief\n", model=strict, code=2)
    assert "the system message was not set: the conversation: the chat template rejects these messages" in talk.err
    talk("sea\n", "--system-prompt", "be brief", model=strict, code=2)
    assert "no system" in talk.err


def test_answers_are_json_and_quiet_answers_what_is_asked(talk: Talking) -> None:
    """With `--log-format json` each answer is one object; `--quiet` does not silence commands of the user."""
    text = "\n".join(talk("sea sky\nfig?\n"))
    assert text.count("\n") >= 1
    found = [json.loads(line) for line in talk("sea sky\nfig?\n", "--log-format", "json")]
    assert "\n".join(one["text"] for one in found if one["kind"] == "answer") == text
    assert all(json.loads(line)["kind"] != "error" for line in talk.err.splitlines())
    found = [json.loads(line) for line in talk("sea\n/b\n", "--compare", talk.model, "--log-format", "json")]
    assert [one["kind"] for one in found] == ["info", "answer", "info", "answer"]

    talk("sea\n/b\n/help\n", "--compare", talk.model, "--blind", "--quiet")
    assert "loading model" not in talk.err
    assert "A was " in talk.err
    assert "/retry" in talk.err
    talk("sea\n/good\n", "--feedback", talk.path / "q.jsonl", "--quiet")
    assert "Train on them: tropism kto" in talk.err


def test_the_command_that_trains_renders_as_the_chat_did(talk: Talking) -> None:
    """With the same template, for a base without one, and the same values for it."""
    bare, file = talk.copy("bare", chat_template=None), talk.path / "f.jsonl"
    template = talk.path / "it's.jinja"
    template.write_text(CHATML + "{% if word %}{% endif %}")
    given = ["--chat-template", str(template), "--chat-template-kwargs", "word=it's"]
    talk("sea\n/good\nfig\n/bad\n", "--feedback", file, *given, model=bare)
    command = shlex.split(talk.err.rpartition("Train on them: tropism ")[2])
    assert command[5:] == [*given, "--output", "RUN"]
    command = [*command[:-1], str(talk.path / "run"), "--max-steps", "1", "--no-report", "--samples", "0"]
    assert main(command) == 0
