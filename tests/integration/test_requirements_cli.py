"""Requirements about data and tokens, each on the way that a user goes: files, commands, and what these write."""

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from helpers import fixture_parts
from integration.looking import Bench, answer_ids, audit, bench, by_id, learned, left_out, prompt_ids, steps

__all__ = ["bench"]
VOCABULARY = fixture_parts()["vocab_size"]


def zero_head(bench: Bench) -> None:
    """`model_uniform` of the cases: an output head of its own that is all zeros."""
    path = bench.with_tokenizer("uniform", pad_token="<|eos|>", padding_side="left")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    weights = load_file(path / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * 0}, path / "model.safetensors",
              metadata={"format": "pt"})


# --- M -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["tree", "padded"])
def test_a_head_of_zeros(bench: Bench, layout: str) -> None:
    """M3, M4: -(characters + 1) ln V for each side, whatever the prompt's length; pad == eos, padded on the left."""
    zero_head(bench)
    rows = [{"id": f"r{n}", "prompt": "p" * length, "chosen": "yes" * (n + 1), "rejected": "n" * (40 - 9 * n)}
            for n, length in enumerate((1, 7, 50, 300))]
    out = bench.path / "scores.jsonl"
    code = bench.call("score", bench.model, "--data", bench.file(rows), "--output", out, "--layout", layout)
    assert code == 0, bench.err
    found = {line["id"]: line for line in map(json.loads, out.read_text().splitlines())}
    for row in rows:
        for side in ("chosen", "rejected"):
            assert found[row["id"]][f"{side}_tokens"] == len(row[side]) + 1
            assert found[row["id"]][f"{side}_logps"] == pytest.approx(
                -(len(row[side]) + 1) * math.log(VOCABULARY), rel=1e-6)


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say <two>  words.\n"},
        {"role": "assistant", "content": " One "}, {"role": "user", "content": "And?"}]


@pytest.mark.parametrize("rows", [
    {"prompt": CHAT, "chosen": "Two.", "rejected": " Three\n"},
    {"prompt": CHAT, "completion": [{"role": "assistant", "content": "Two."}], "label": True},
    {"messages": [*CHAT, {"role": "assistant", "content": "Two."}], "tools": [{"name": "lamp", "n": [1, {"a": "b"}]}]},
], ids=["pair", "labeled", "single"])
def test_prompt_ids_are_those_of_generation(bench: Bench, rows: dict[str, Any]) -> None:
    """M1, M2, T2, T4: one prompt for all sides, as the tokenizer in the model's directory makes it for generation."""
    shown, = bench.look([rows])["shown"]
    tokenizer = AutoTokenizer.from_pretrained(bench.model)
    generation = tokenizer.apply_chat_template(CHAT, tools=rows.get("tools"), add_generation_prompt=True)["input_ids"]
    assert prompt_ids(shown) == generation
    answers = [rows["chosen"], rows["rejected"]] if "chosen" in rows else ["Two."]
    assert learned(shown) == [[text + "<|end|>"] for text in answers]
    for side, text in enumerate(answers):
        whole = tokenizer.apply_chat_template([*CHAT, {"role": "assistant", "content": text}],
                                              tools=rows.get("tools"))["input_ids"]
        ids = prompt_ids(shown) + answer_ids(shown, side)
        assert ids == whole[: len(ids)]
        assert tokenizer.decode(whole[len(ids) :]) == "\n"


# --- K -------------------------------------------------------------------------------------------------------------


def labeled(bench: Bench, kind: str, labels: list[Any]) -> Path:
    rows = [(f"q{n} ", f"a{n}", label) for n, label in enumerate(labels)]
    if kind == "jsonl":
        return bench.file([dict(zip(("prompt", "completion", "label"), row, strict=True)) for row in rows])
    path = bench.path / "rows.csv"
    with path.open("w", newline="") as lines:
        csv.writer(lines).writerows([("prompt", "completion", "label"), *rows])
    return path


@pytest.mark.parametrize(("kind", "label", "spelled"), [
    ("jsonl", "good", "'good'"), ("jsonl", 2, "2"), ("jsonl", 1.0, "1.0"), ("jsonl", None, "None"),
    ("jsonl", [True], "[True]"), ("csv", "good", "'good'"), ("csv", "yes", "'yes'"), ("csv", "", "''"),
    ("csv", "1.0", "'1.0'")])
def test_labels_that_are_none(bench: Bench, kind: str, label: Any, spelled: str) -> None:
    """K3: the seventh row stops the run with its line and value; nothing is written."""
    path = labeled(bench, kind, [True, False, 1, 0, "true", "False", label])
    run = bench.train("kto", path, code=2)
    line = 7 if kind == "jsonl" else 8
    assert bench.err.startswith(f"tropism: rows.{kind}:{line}: label {spelled} is not a boolean")
    assert not run.exists()
    bench.look(path, code=2)
    assert f"rows.{kind}:{line}: label {spelled}" in bench.err


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_labels_are_counted_before_training(bench: Bench, kind: str) -> None:
    """K3: accepted spellings; class counts and the weights that `auto` makes of them stand before the first step."""
    path = labeled(bench, kind, [True, False, 1, 0, "true", "TRUE", "1", "1"])
    run = bench.train("kto", path, "--undesirable-weight", "auto", "--desirable-weight", "auto")
    assert audit(run)["labels"] == {"desirable": 6, "undesirable": 2}
    before = bench.out[: bench.out.index("train 1/1")]
    assert "labels: 6 desirable, 2 undesirable; weights 1 and 3" in before


def test_a_window_weighs_by_rows(bench: Bench) -> None:
    """K4, K5: steps of 4 desirable and 2 undesirable rows in one record: the mean is over 6 rows, not 2 steps."""
    rows = [{"prompt": f"q{n} ", "completion": f"a{n}", "label": n < 4} for n in range(6)]
    run = bench.train("kto", rows, "--shuffle", "false", "--batch-size", 4, "--learning-rate", 0, "--log-every", 2,
                      "--undesirable-weight", 1.5, "--max-steps", 2)
    record, = steps(run)
    assert record["examples"] == 6
    assert record["loss"] == pytest.approx((4 * 0.5 + 2 * 0.75) / 6, abs=1e-6)


# --- T -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["kto", "dpo", "sft", "kd"])
def test_tools_reach_the_prompt_of_every_method(bench: Bench, method: str) -> None:
    """T4: the tokens that a run counts have the schema's in them."""
    ask = [{"role": "user", "content": "q"}]
    row: dict[str, Any] = {"prompt": ask, "completion": "yes"}
    rows = {"kto": [{**row, "label": True}, {**row, "prompt": [{"role": "user", "content": "r"}], "label": False}],
            "dpo": [{"prompt": ask, "chosen": "yes", "rejected": "no"}]}.get(method, [row])
    teacher = ["--teacher", bench.model] if method == "kd" else []
    tool = {"name": "set_lamp", "parameters": {"room": {"type": "string"}}}
    shown = f"#tools\n{json.dumps(tool)}\n#\n"
    tokens = {}
    for tools in (None, [tool]):
        run = bench.train(method, [{**row, "tools": tools} for row in rows], *teacher)
        tokens[tools is None] = steps(run)[0]["tokens"]
    assert tokens[False] - tokens[True] == len(shown) * (2 if method in ("kto", "dpo") else 1)


# --- D -------------------------------------------------------------------------------------------------------------

WORDS = ["oak ", "fir ", "<|end|>", "a", "elm\n", "  ", "0123456789"]


@pytest.mark.parametrize("limits", [(2, None), (3, 1), (9, None), (24, 8), (40, 39), (64, None), (100, 30)])
@pytest.mark.parametrize("supervise", ["last", "all"])
def test_random_pairs_under_limits(bench: Bench, limits: tuple[int, int | None], supervise: str) -> None:
    """D1, D2, M2: something to learn on each side, a difference, one prompt within its limit, and ends only if whole.

    Every row is either shown or listed, and a run trains on the same tokens.
    """
    generator = random.Random(f"{limits} {supervise}")

    def text(most: int) -> str:
        return "".join(generator.choices(WORDS, k=generator.randint(1, most)))

    rows = []
    for number in range(20):
        turns = [{"role": ("user", "assistant")[n % 2], "content": text(8)} for n in range(generator.choice((1, 3, 5)))]
        if generator.random() < 0.4:
            turns.insert(0, {"role": "system", "content": text(6)})
        rows.append({"id": f"r{number}", "prompt": turns, "chosen": text(6), "rejected": text(6)})
    length, prompt_limit = limits
    options = ["--max-length", length, "--supervise", supervise]
    options += ["--max-prompt-length", prompt_limit] if prompt_limit else []
    report = bench.look(rows, *options)
    shown = by_id(report)
    assert len(shown) + len(report["dropped_rows"]) == 20
    assert set(left_out(report).values()) <= {"empty_completion", "identical_pair", "no_supervised_token"}
    for row in shown.values():
        sides = [answer_ids(row, side) for side in (0, 1)]
        assert 1 <= len(prompt_ids(row)) <= (prompt_limit or length)
        assert sides[0] != sides[1]
        for side, ids in enumerate(sides):
            assert answer_ids(row, side, learned=True)
            assert len(prompt_ids(row)) + len(ids) <= length
            whole = learned(row)[side][-1].endswith("<|end|>") and ids[-1] == 4
            assert whole or len(prompt_ids(row)) + len(ids) == length
    flat = sum(len(prompt_ids(row)) + len(answer_ids(row, side)) for row in shown.values() for side in (0, 1))
    assert report["tokens"]["flat"] == flat
