"""Rendering in blocks: the same rows in the same order from any number of processes, and from a cache or not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from helpers import CHATML, build_tokenizer, chat
from tropism.data.formats.options import FormatOptions
from tropism.data.read_rows import read_rows
from tropism.data.rows import EncodedRow
from tropism.data.tokenization import encode
from tropism.data.tokenization.encode import BlockCache, fingerprint
from tropism.data.tokenization.render import Renderer
from tropism.data.tokenization.truncate import Limits
from tropism.errors import DataError, TropismError

LIMITS = Limits(64)
BLOCK_ROWS = 60


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(encode, "BLOCK_ROWS", BLOCK_ROWS)


def records(count: int) -> list[dict]:
    return [{"prompt": [{"role": "user", "content": f"oak {n % 700}?"}],
             "completion": [{"role": "assistant", "content": "elm " * (n % 5)}], "label": n % 3 == 0}
            for n in range(count)]


def content(rows) -> list[tuple]:
    return [(row.id, row.place, row.prompt_ids.tolist(), row.desirable, row.split_key, row.notes,
             [(side.ids.tolist(), side.loss_mask.tolist()) for side in row.completions]) for row in rows]


def renderer(**changes) -> Renderer:
    return Renderer(build_tokenizer(chat_template=CHATML), LIMITS, **changes)


@pytest.fixture
def counted(monkeypatch) -> list[str]:
    """Places of the rows that are really rendered in this process."""
    seen: list[str] = []
    plain = Renderer.encode
    monkeypatch.setattr(Renderer, "encode", lambda self, row: (seen.append(row.place), plain(self, row))[1])
    return seen


def test_full_blocks_are_rendered_once(tmp_path, counted):
    rows = records(2 * BLOCK_ROWS + 30)
    first = read_rows(rows, renderer(), "unpaired", cache=tmp_path)
    rendered = len(counted)
    assert rendered == sum(bool(row["completion"][0]["content"].strip()) for row in rows)
    other = renderer()
    second = read_rows(rows, other, "unpaired", cache=tmp_path)
    assert len(counted) - rendered < BLOCK_ROWS  # the last block is not full, and is no file
    assert content(first.rows) == content(second.rows) == content(read_rows(rows, renderer(), "unpaired").rows)
    assert first.to_json() == second.to_json()
    assert other.saw_messages
    assert other.stop_ids


def test_labels_ids_and_places_are_not_what_a_block_is_known_by(tmp_path, counted):
    read_rows(records(BLOCK_ROWS * 2), renderer(), "unpaired", cache=tmp_path)
    del counted[:]
    others = [{**row, "label": not row["label"], "id": f"row-{n}"} for n, row in enumerate(records(BLOCK_ROWS * 2))]
    found = read_rows(others, renderer(), "unpaired", cache=tmp_path)
    assert len(counted) < BLOCK_ROWS
    assert found.rows[0].id == "row-1"
    assert found.rows[0].desirable is True


@pytest.mark.parametrize("change", [
    lambda: Renderer(build_tokenizer(chat_template=CHATML + "{# #}"), LIMITS),
    lambda: Renderer(build_tokenizer(chat_template=CHATML, auto_bos=True), LIMITS),
    lambda: Renderer(build_tokenizer(chat_template=CHATML, eos_token="<|end|>"), LIMITS),
    lambda: Renderer(build_tokenizer(chat_template=CHATML), Limits(63)),
    lambda: Renderer(build_tokenizer(chat_template=CHATML), Limits(64, 20)),
    lambda: renderer(supervise="all"), lambda: renderer(control_tokens="keep"),
    lambda: renderer(control_tokens="refuse"), lambda: renderer(system_prompt="x"), lambda: renderer(system_prompt=""),
    lambda: renderer(template_kwargs={"enable_thinking": False}),
    lambda: renderer(template_kwargs={"enable_thinking": "False"})])
def test_h1_whatever_decides_the_ids_is_part_of_the_key(change):
    assert fingerprint(change()) != fingerprint(renderer())
    assert fingerprint(change()) == fingerprint(change())


def test_h1_what_only_the_tokenizers_settings_say_is_part_of_the_key(tmp_path):
    """Options that stand beside the tokenizer's own file decide ids as well."""
    import json

    from transformers import AutoTokenizer

    build_tokenizer(chat_template=CHATML).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    prints = []
    for change in ({}, {"split_special_tokens": True}, {"extra_special_tokens": ["<|turn|>"]}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **change}))
        prints.append(fingerprint(Renderer(AutoTokenizer.from_pretrained(tmp_path), LIMITS)))
    assert prints[0] != prints[1]
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in state["added_tokens"]:
        token["special"] = token["special"] and token["content"] != "<|turn|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    with_turn = fingerprint(Renderer(AutoTokenizer.from_pretrained(tmp_path), LIMITS))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert with_turn != fingerprint(Renderer(AutoTokenizer.from_pretrained(tmp_path), LIMITS))


class Louder(PreTrainedTokenizerFast):
    """Code of a user's."""

    def apply_chat_template(self, *given, **named):
        return super().apply_chat_template(*given, **named)


def test_h1_code_that_is_not_the_librarys_is_neither_cached_nor_sent_away(tmp_path, monkeypatch, counted):
    monkeypatch.setattr(encode, "_BLOCKS_BEFORE_WORKERS", 0)
    plain = build_tokenizer(chat_template=CHATML)
    plain.__class__ = Louder
    for _ in range(2):
        del counted[:]
        rows = [row for row in records(3 * BLOCK_ROWS) if row["completion"][0]["content"]]
        read_rows(rows, Renderer(plain, LIMITS), "unpaired", workers=2, cache=tmp_path)
        assert len(counted) == len(rows)
    assert not list(tmp_path.iterdir())


def test_h1_the_code_that_renders_and_its_libraries_are_part_of_the_key(monkeypatch):
    before = fingerprint(renderer())
    monkeypatch.setattr(encode, "version", lambda name: "0")
    assert fingerprint(renderer()) != before
    monkeypatch.undo()
    monkeypatch.setattr(encode, "_RENDERING_CODE", (*encode._RENDERING_CODE, "batching/pack"))
    assert fingerprint(renderer()) != before


def test_h1_all_code_that_the_renderer_imports_is_part_of_the_key():
    root = Path(encode.__file__).parents[1]
    found, waiting = set(), ["tokenization/render"]
    while waiting:
        name = waiting.pop()
        found.add(name)
        text = (root / f"{name}.py").read_text(encoding="utf-8")
        imports = re.findall(r"^from tropism\.data\.([\w.]+) import ([\w, ]+)", text, re.MULTILINE)
        paths = [path.replace(".", "/") for path, _ in imports]
        paths += [f"{path.replace('.', '/')}/{part}" for path, parts in imports for part in parts.split(", ")]
        waiting += [path for path in paths if (root / f"{path}.py").is_file() and path not in found]
    assert {"tokenization/turns", "tokenization/tool_arguments"} <= found <= set(encode._RENDERING_CODE)


def test_h1_a_template_that_asks_for_the_date_is_rendered_anew_each_day(monkeypatch):
    class Tomorrow(encode.date):
        @classmethod
        def today(cls):
            return cls(2999, 1, 1)

    dated = Renderer(build_tokenizer(chat_template="{{ strftime_now('%d') }}" + CHATML), LIMITS)
    before, plain = fingerprint(dated), fingerprint(renderer())
    monkeypatch.setattr(encode, "date", Tomorrow)
    assert fingerprint(dated) != before
    assert fingerprint(renderer()) == plain


@pytest.mark.parametrize("other", [
    chat("oak?", answers=("elm",)), chat("oak", answers=("elm ",)), chat("oak", answers=("elm",), system=""),
    chat("oak", answers=("elm",), tools=({"a": 1, "b": 2},)), chat("oak", answers=("elm",), tools=({"b": 2, "a": 1},)),
    chat("oak", answers=("elm",), tools=({"a": 1, "b": 2.0},))])
def test_h1_the_rows_are_part_of_the_key(other, tmp_path):
    cache = BlockCache(tmp_path, renderer())
    row = chat("oak", answers=("elm",))
    assert cache.path([row]) != cache.path([other])
    assert cache.path([row, other]) != cache.path([other, row])
    assert cache.path([chat("o" + "ak", answers=("e" + "lm",))]) == cache.path([row])


def test_what_has_no_canonical_form_is_not_cached(tmp_path):
    assert BlockCache(tmp_path, renderer()).path([chat("oak", tools=({"a": object()},))]) is None


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    rows = records(2 * BLOCK_ROWS)
    found = read_rows(rows, renderer(), "unpaired", cache=tmp_path / "file" / "below")
    assert content(found.rows) == content(read_rows(rows, renderer(), "unpaired").rows)


@pytest.mark.parametrize("cached", [True, False])
def test_processes_change_nothing(tmp_path, monkeypatch, counted, cached):
    rows = records(7 * BLOCK_ROWS)  # a fifth of them is empty
    alone = read_rows(rows, renderer(), "unpaired")
    monkeypatch.setattr(encode, "_BLOCKS_BEFORE_WORKERS", 1)
    del counted[:]
    other = renderer()
    found = read_rows(rows, other, "unpaired", workers=2, cache=tmp_path if cached else None)
    assert len(counted) == BLOCK_ROWS  # the first block; the others were rendered elsewhere
    assert content(found.rows) == content(alone.rows)
    assert [drop.place for drop in found.dropped] == [drop.place for drop in alone.dropped]
    assert other.stop_ids
    assert other.saw_messages


def test_an_error_of_another_process_is_raised_here(monkeypatch):
    monkeypatch.setattr(encode, "_BLOCKS_BEFORE_WORKERS", 0)
    rows = [{**row, "completion": [{"role": "assistant", "content": "elm"}]} for row in records(3 * BLOCK_ROWS)]
    rows[100]["tools"] = [{"type": "function", "function": {"name": "x"}}]
    with pytest.raises(DataError, match=r"row 101: .*tools"):
        read_rows(rows, renderer(), "unpaired", workers=2)


def test_a_process_that_dies_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(encode, "_BLOCKS_BEFORE_WORKERS", 0)
    plain = subprocess.Popen
    monkeypatch.setattr(encode.subprocess, "Popen", lambda command, **given: plain(["true"], **given))
    with pytest.raises(TropismError, match=r"worker process .* died"):
        read_rows(records(3 * BLOCK_ROWS), renderer(), "unpaired", workers=2)


def test_files_beside_the_user_are_not_imported(monkeypatch, tmp_path):
    monkeypatch.setattr(encode, "_BLOCKS_BEFORE_WORKERS", 0)
    (tmp_path / "queue.py").write_text("raise SystemExit(3)\n")
    monkeypatch.chdir(tmp_path)
    assert len(read_rows(records(3 * BLOCK_ROWS), renderer(), "unpaired", workers=2).rows) == 144


def test_rows_left_out_are_told_in_file_order():
    rows = records(2 * BLOCK_ROWS)
    for number in range(0, len(rows), 10):  # left out when it is rendered, the empty ones when they are understood
        rows[number] = {**rows[number], "completion": [
            {"role": "assistant", "content": "oak " * 9}, {"role": "user", "content": "q"},
            {"role": "assistant", "content": "elm"}]}
    found = read_rows(rows, Renderer(build_tokenizer(chat_template=CHATML), Limits(8)), "unpaired")
    numbers = [int(drop.place.split()[1]) for drop in found.dropped]
    assert numbers == sorted(numbers)
    assert len({drop.reason for drop in found.dropped}) > 1
    assert found.read == len(rows)


@pytest.mark.parametrize("most", [1, 50, 150])
def test_a_stream_is_read_as_far_as_it_is_needed(most):
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield records(7)[taken % 7]

    found = read_rows(endless(), renderer(), "unpaired", most=most)
    assert len(found.rows) == most
    assert taken <= most * 2 + 2  # two of seven are empty, and are made up for
    assert isinstance(found.rows[0], EncodedRow)


def test_origins_stand_beside_the_rows_that_were_kept():
    rows = [{**row, "source": "web" if n % 2 else None} for n, row in enumerate(records(150))]
    found = read_rows(rows, renderer(), "unpaired")
    wanted = ["web" if int(row.place.split()[1]) % 2 == 0 else None for row in found.rows]
    assert found.origins == {"source": wanted}
    twice = [{**row, "completion": [{"role": "assistant", "content": "elm" if label else "ash"}], "label": label,
              "source": "web"} for row in rows[:30] for label in (True, False)]
    paired = read_rows(twice, renderer(), "paired", options=FormatOptions(pair_by_prompt=True))
    assert paired.origins == {"source": ["web"] * 30}


def test_a_child_needs_no_environment_of_ours(tmp_path):
    """`python -m tropism.data.tokenization.encode` ends when its input does, and says nothing."""
    source = str(Path(encode.__file__).parents[3])
    run = subprocess.run([sys.executable, "-m", "tropism.data.tokenization.encode"], input=b"",
                         capture_output=True, cwd="/", check=False, env={"PYTHONPATH": source})
    assert (run.returncode, run.stdout) == (0, b"")
