"""Inputs 09 to 16 of `tests/cases` on the command line, number by number as EXPECTED.yaml has them."""

from typing import Any

import pytest

from helpers import CASES, case_rows, case_yaml, expected
from integration.looking import (
    Bench,
    answer_ids,
    audit,
    bench,
    by_id,
    learned,
    left_out,
    prompt_ids,
    prompt_text,
    steps,
)

__all__ = ["bench"]
BOS, EOS, TURN, END = 0, 1, 3, 4


# --- 09: prompts over the limit --------------------------------------------------------------------------------------


def test_09_lengths_and_ends(bench: Bench) -> None:
    """D1, D2: what is kept of each prompt and answer, and whether its end is learned."""
    limit = expected("09")["max_length"]
    report = bench.look(CASES / "09-prompt-over-limit.jsonl", "--max-length", limit)
    rows = by_id(report)
    assert sorted(rows) == ["q1", "q2", "q3"]
    for raw in case_rows("09-prompt-over-limit.jsonl"):
        shown, want = rows[raw.record["id"]], expected("09")[raw.record["id"]]
        assert len(prompt_ids(shown)) == want["prompt_kept"]
        assert len(answer_ids(shown)) == want["completion_kept"]
        assert (answer_ids(shown, learned=True)[-1] == EOS) is want["terminator_label"]
        assert raw.record["prompt"].endswith(prompt_text(shown))
        ((text,),) = learned(shown)
        whole = raw.record["completion"] + "<|eos|>"
        assert text == whole if want["terminator_label"] else whole.startswith(text)
    assert {row["place"][-2:]: row["notes"] for row in report["changed_rows"]} == {
        ":1": ["prompt_cut"], ":3": ["completion_cut"]}


def test_09_a_run_trains_on_what_is_shown(bench: Bench) -> None:
    """D1, D2: the audit and the token count of a run are those of `inspect`."""
    path, limit = CASES / "09-prompt-over-limit.jsonl", expected("09")["max_length"]
    report = bench.look(path, "--max-length", limit)
    run = bench.train("kto", path, "--max-length", limit, "--batch-size", 3)
    assert audit(run)["rows"] == report["rows"]
    assert audit(run)["changed_rows"] == report["changed_rows"]
    want = sum(expected("09")[name][part] for name in ("q1", "q2", "q3") for part in ("prompt_kept", "completion_kept"))
    assert steps(run)[0]["tokens"] == audit(run)["tokens"]["flat"] == report["tokens"]["flat"] == want


# --- 10: empty completions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["inspect", "dpo", "kto"])
def test_10_what_is_left_out(bench: Bench, method: str) -> None:
    """D3: read, kept and left out by reason, with lines; a pair given to KTO counts its sides one by one."""
    path, want = CASES / "10-empty-completions.jsonl", expected("10")
    report = bench.look(path) if method == "inspect" else audit(bench.train(method, path))
    rows = report["rows"]
    assert rows["read"] == want["read"]
    assert {drop["place"].split(":")[0] for drop in report["dropped_rows"]} == {path.name}
    if method == "kto":  # chosen of e1 and e2 and rejected of e3 are answers like any other; e5 loses both
        assert (rows["kept"], rows["dropped"]) == (5, {"empty_completion": 3, "missing_field": 1, "empty_prompt": 2})
        assert report["labels"] == {"desirable": 3, "undesirable": 2}
        return
    assert (rows["kept"], rows["dropped"]) == (want["kept"], want["dropped"])
    assert left_out(report) == {1: "empty_completion", 2: "empty_completion", 3: "empty_completion",
                                4: "missing_field", 5: "empty_prompt"}
    assert "6 read, 1 kept: 3 empty_completion, 1 missing_field, 1 empty_prompt" in bench.out


def test_10_with_a_bos_the_empty_prompt_is_kept(bench: Bench) -> None:
    """D3, T1: there is a token to predict from."""
    bench.with_tokenizer(auto_bos=True)
    report = bench.look(CASES / "10-empty-completions.jsonl")
    assert report["rows"]["kept"] == expected("10")["kept"] + 1
    shown = by_id(report)["e5"]
    assert prompt_ids(shown) == [BOS]
    assert learned(shown) == [["Ready.<|eos|>"], ["Not ready.<|eos|>"]]


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_10_strict(bench: Bench, method: str) -> None:
    """D3: the first row that would be left out stops the run, with its line; nothing is written."""
    run = bench.train(method, CASES / "10-empty-completions.jsonl", "--strict", code=2)
    assert "10-empty-completions.jsonl:1: empty_completion: 'rejected' is empty (--strict)" in bench.err
    assert not run.exists()
    report = bench.look(CASES / "10-empty-completions.jsonl", "--strict", code=1)  # it looks at everything first
    assert report["rows"]["dropped"] == expected("10")["dropped"]


# --- 11: pairs that share their start --------------------------------------------------------------------------------


def test_11_each_pair(bench: Bench) -> None:
    """M1, M2, D1: shared messages are the prompt; never shared letters, never an answer on both sides."""
    report = bench.look(CASES / "11-dpo-shared-prefix.jsonl")
    rows, want = by_id(report), expected("11")
    assert left_out(report) == {1: "no_completion", 2: "identical_pair", 3: "missing_field", 4: "missing_field"}
    details = {drop["place"][-2:]: drop["detail"] for drop in report["dropped_rows"]}
    assert details[":1"] == "'chosen' has no completion after the shared messages"
    assert details[":3"] == details[":4"] == "no 'prompt', which plain text needs"
    assert sorted(rows) == ["x5", "x6"]
    assert prompt_text(rows["x5"]) == want["x5"]["prompt"]
    assert learned(rows["x5"]) == [[want["x5"][side] + "<|eos|>"] for side in ("chosen", "rejected")]
    assert prompt_ids(rows["x6"]).count(TURN) == want["x6"]["prompt_messages"] + 1  # and that of the answer
    assert prompt_ids(rows["x6"]).count(END) == want["x6"]["prompt_messages"]
    assert learned(rows["x6"]) == [[want["x6"][side] + "<|end|>"] for side in ("chosen", "rejected")]


def test_11_an_empty_prompt_of_its_own(bench: Bench) -> None:
    """M1: plain strings of x3 and x4 with the prompt that they ask for: byte for byte, and nothing taken from them."""
    bench.with_tokenizer(auto_bos=True)
    rows = [{"prompt": "", **raw.record} for raw in case_rows("11-dpo-shared-prefix.jsonl")[2:4]]
    shown = by_id(bench.look(rows))
    for row in rows:
        assert prompt_ids(shown[row["id"]]) == [BOS]
        assert learned(shown[row["id"]]) == [[row[side] + "<|eos|>"] for side in ("chosen", "rejected")]


def test_11_runs(bench: Bench) -> None:
    """D1: two pairs train; their halves as labeled completions too."""
    path = CASES / "11-dpo-shared-prefix.jsonl"
    run = bench.train("dpo", path)
    assert audit(run)["rows"]["kept"] == steps(run)[0]["examples"] == 2
    assert steps(run)[0]["loss"] == pytest.approx(0.693147, abs=1e-6)
    run = bench.train("kto", path)
    assert audit(run)["labels"] == {"desirable": 2, "undesirable": 2}
    bench.train("dpo", path, "--strict", code=2)
    assert "11-dpo-shared-prefix.jsonl:1: no_completion" in bench.err


# --- 13: padding and end are one token -------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
def test_13_the_end_is_learned(bench: Bench, side: str) -> None:
    """M4: the end counts, whatever the padding's id and side."""
    bench.with_tokenizer(pad_token="<|eos|>", padding_side=side)
    report = bench.look(CASES / "13-pad-is-eos.jsonl")
    for shown in report["shown"]:
        want = expected("13")[shown["id"]]
        assert len(answer_ids(shown, learned=True)) == want["supervised"]
        assert answer_ids(shown, learned=True)[-1] == want["last_label_id"]
        assert want["supervised"] != expected("13")["wrong_count_when_pad_id_is_masked"][shown["id"]]
    assert len(report["shown"]) == 2


def test_13_loss_and_gradient_do_not_know_the_padding(bench: Bench) -> None:
    """M4: one loss and one gradient norm for pad == eos or not, left or right, in the padded layout and the tree."""
    found = []
    for number, changes in enumerate(({}, {"pad_token": "<|eos|>"}, {"pad_token": "<|eos|>", "padding_side": "left"})):
        for layout in ("padded", "tree"):
            bench.with_tokenizer(f"model{number}{layout}", **changes)
            step, = steps(bench.train("sft", CASES / "13-pad-is-eos.jsonl", "--layout", layout))
            found.append((step["loss"], step["grad_norm"], step["tokens"]))
    for loss, norm, tokens in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert norm == pytest.approx(found[0][1], rel=1e-5)
        assert tokens == found[0][2] == len("Short: fig#") + len("Longer: pineapple#")


# --- 14: one BOS, one end --------------------------------------------------------------------------------------------


CASE_14: dict[str, Any] = case_yaml("14-bos-eos-once.yaml")
TOKENIZERS = {"auto_bos_on": {"auto_bos": True}, "auto_bos_off": {}, "bos_token_is_null": {"bos_token": None}}
WANTED_14 = {"A": (0, 1, 0), "B": (0, 1, 0), "C": (0, 0, 1)}  # BOS, EOS and ends of the answer


@pytest.mark.parametrize("variant", TOKENIZERS)
def test_14_templates_one_after_the_other(bench: Bench, variant: str) -> None:
    """T1, H1: A, B, C and A again over one model directory, one report and one cache: each with its own count."""
    data = bench.file([{"id": "c", "messages": CASE_14["messages"]}])
    named = {name[0]: name for name in CASE_14["templates"]}
    for letter in ("A", "B", "C", "A"):
        want = expected("14")[named[letter]]
        bench.with_tokenizer(chat_template=CASE_14["templates"][named[letter]], **TOKENIZERS[variant])
        report = bench.look(data)
        shown = by_id(report)["c"]
        prompt, answer = prompt_ids(shown), answer_ids(shown)
        bos = want["bos_in_render"] if variant != "bos_token_is_null" else 0
        assert prompt.count(BOS) == bos
        assert bos <= 1
        assert (answer.count(BOS), answer.count(EOS), answer.count(END)) == WANTED_14[letter]
        assert prompt.count(END) == max(want["end_in_render"] - 1, 0)
        assert None not in prompt + answer
        assert answer == answer_ids(shown, learned=True)
        assert learned(shown) == [["Seven." + ("<|end|>" if letter == "C" else "<|eos|>")]]
        assert report["rows"]["eos_added"] == (1 if letter == "B" else 0)
        assert ("One EOS was added" in " ".join(bench.out.split())) == (letter == "B")
        # B and C render a line end behind the answer, which is not learned; B has no end, and gets one.
        ours = want["rendered_tokens"] - (letter in "BC") + (letter == "B") - (want["bos_in_render"] - bos)
        assert len(prompt) + len(answer) == report["tokens"]["flat"] == ours


@pytest.mark.parametrize("variant", TOKENIZERS)
def test_14_plain_row(bench: Bench, variant: str) -> None:
    """T1: exactly one EOS, learned; the BOS only where the tokenizer puts one."""
    bench.with_tokenizer(**TOKENIZERS[variant])
    shown, = bench.look([CASE_14["plain_row"]])["shown"]
    whole = prompt_ids(shown) + answer_ids(shown)
    assert whole.count(EOS) == 1
    assert answer_ids(shown, learned=True)[-1] == EOS
    assert whole.count(BOS) == (1 if variant == "auto_bos_on" else 0)
    assert learned(shown) == [[CASE_14["plain_row"]["completion"] + "<|eos|>"]]


def test_14_runs_with_one_store(bench: Bench) -> None:
    """T1, H1: runs with A, B and C, nothing deleted in between; each trains on its own tokens."""
    data = bench.file([{"messages": CASE_14["messages"]}])
    named = {name[0]: name for name in CASE_14["templates"]}
    flat = {}
    for letter in "ABC":
        bench.with_tokenizer(chat_template=CASE_14["templates"][named[letter]])
        run = bench.train("sft", data)
        flat[letter] = steps(run)[0]["tokens"]
        assert audit(run)["tokens"]["flat"] == flat[letter]
        assert bench.call("sft", "--model", bench.model, "--data", data, "--output", run) == 2  # never written over
        assert "--output" in bench.err
    assert flat == {"A": 38, "B": 38, "C": 40}


# --- 15: several turns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("supervise", ["all", "last"])
def test_15_turns(bench: Bench, supervise: str) -> None:
    """M1, T2, T3: the learned texts and their tokens; a spelled control token opens no turn."""
    report = bench.look(CASES / "15-multiturn-assistant-mask.jsonl", "--supervise", supervise)
    rows = by_id(report)
    assert sorted(rows) == ["m1", "m2"]
    for name, shown in rows.items():
        want = expected("15")[name]
        texts = want["supervised_all_turns"] if supervise == "all" else [want["supervised_last_turn_only"]]
        assert learned(shown) == [texts]
        tokens = want["supervised_tokens_all_turns"] if supervise == "all" else len(texts[0]) - len("<|end|>") + 1
        assert len(answer_ids(shown, learned=True)) == tokens
        assert (prompt_ids(shown) + answer_ids(shown)).count(TURN) == want["real_turns"]
        assert (prompt_ids(shown) + answer_ids(shown)).count(END) == want["real_turns"]
    assert report["rows"]["control_spelled"] == 1
    assert expected("15")["m2"]["turn_ids_in_naive_encoding"] > expected("15")["m2"]["real_turns"]


def test_15_a_run(bench: Bench) -> None:
    """T2, T3: the same rows, counted in the audit of a run."""
    for supervise in ("all", "last"):
        path = CASES / "15-multiturn-assistant-mask.jsonl"
        report = bench.look(path, "--supervise", supervise)
        run = bench.train("sft", path, "--supervise", supervise)
        assert audit(run)["rows"] == report["rows"]
        assert steps(run)[0]["tokens"] == report["tokens"]["flat"]


# --- 16: tools -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_16_tools(bench: Bench, kind: str) -> None:
    """T4: the keys that the user wrote and no others, from a file that unites the columns of all rows too."""
    path = CASES / "16-tools-null-keys.jsonl"
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.Table.from_pylist([raw.record for raw in case_rows(path.name)])
        path = bench.path / "tools.parquet"
        pyarrow.parquet.write_table(table, path)
    rows = by_id(bench.look(path))
    assert sorted(rows) == ["w1", "w2"]
    for name, shown in rows.items():
        text, want = prompt_text(shown), expected("16")[name]
        assert [word for word in want["must_contain"] if word not in text] == []
        assert [word for word in want["must_not_contain"] if word in text] == []
    run = bench.train("kto", path)
    assert audit(run)["labels"] == {"desirable": 1, "undesirable": 1}
    assert steps(run)[0]["tokens"] == sum(
        len(prompt_ids(shown)) + len(answer_ids(shown)) for shown in rows.values())
