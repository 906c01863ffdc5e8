"""Exports of annotation and feedback tools, in the shapes that the tools publish: read as pairs or as labels."""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tropism.data.formats import view_of
from tropism.data.rows import Reason
from tropism.errors import DataError
from unit.test_formats_known import answer, raw, read, refused, short, user

UP, DOWN = ("p", "x", True), ("p", "x", False)
FIRST, SECOND = ("p", "x", "y"), ("p", "y", "x")
NONE = (Reason.NO_LABEL,)


def rows(view: Any, *records: dict[str, Any], **options: Any) -> list[Any]:
    return [short(row) for row in read(view, *records, **options)[1]]


# --- Label Studio ----------------------------------------------------------------------------------------------------


def item(kind: str, value: Any, name: str = "pw") -> dict[str, Any]:
    return {"from_name": name, "to_name": "text1,text2", "type": kind, "id": "Dx_aB91ISN", "origin": "manual",
            "value": value}


def annotation(*items: dict[str, Any], cancelled: bool = False) -> dict[str, Any]:
    return {"id": 1001, "result": list(items), "was_cancelled": cancelled, "ground_truth": False, "completed_by": 10,
            "lead_time": 4.3, "created_at": "2021-03-09T22:16:08.728353Z", "task": 1, "parent_prediction": None}


def task(*annotations: dict[str, Any], **data: Any) -> dict[str, Any]:
    return {"id": 1, "annotations": list(annotations), "drafts": [], "predictions": [
        {"model_version": "m", "result": [item("choices", {"choices": ["Bad"]})]}],
        "data": data or {"prompt": "p", "answer1": "x", "answer2": "y"}, "meta": {}, "created_at": "2021-03-09T21:52Z",
        "inner_id": 1, "total_annotations": 1, "cancelled_annotations": 0, "project": 83, "file_upload": "a.json"}


def one(**more: Any) -> dict[str, Any]:
    return {"prompt": "p", "response": "x", **more}


def test_label_studio_pairs() -> None:
    left, right = (annotation(item("pairwise", {"selected": side})) for side in ("left", "right"))
    name, found = read("paired", task(left), task(right))
    assert (name, [short(row) for row in found]) == ("label-studio", [FIRST, SECOND])
    assert view_of(raw(task(left))) == "paired"
    chosen = [annotation(item("choices", {"choices": [choice]}, "better"))
              for choice in ("Response 2", "Tie", "Response 1")]
    assert rows("paired", *map(task, chosen)) == [SECOND, (Reason.TIE,), FIRST]
    assert rows("paired", task(left, prompt="p", text1="x", text2="y", source="crm")) == [FIRST]


def test_label_studio_labels() -> None:
    good, bad = (annotation(item("choices", {"choices": [choice]}, "quality")) for choice in ("Good", "Bad"))
    assert rows("unpaired", task(good, **one()), task(bad, **one())) == [UP, DOWN]
    assert view_of(raw(task(good, **one()))) == "unpaired"
    stars = [task(annotation(item("rating", {"rating": number})), **one()) for number in (5, 2)]
    assert rows("unpaired", *stars, label_threshold=4) == [UP, DOWN]
    assert "For ratings, use --label-threshold NUMBER" in refused("unpaired", *stars)
    assert rows("unpaired", *stars, labels="5=true,2=drop") == [UP, NONE]
    assert "its opposite does not occur" in refused("unpaired", task(good, **one()))


def test_system_prompts_of_tools() -> None:
    """A system prompt among the fields reaches the prompt."""
    for make in (lambda **given: task(annotation(item("choices", {"choices": ["true"]})), **given),
                 lambda **given: record({"q": said(True)}, **given)):
        assert rows("unpaired", make(**one(system="s"))) == [(["s: s", "u: p"], ["a: x"], True)]


def test_label_studio_annotators() -> None:
    """Skipped ones do not count; most of the others decide; without a majority the task is dropped and counted."""
    left, right = (annotation(item("pairwise", {"selected": side})) for side in ("left", "right"))
    skipped = annotation(cancelled=True)
    assert rows("paired", task(left, skipped), task(skipped), task(), task(left, right), task(left, right, right),
                task(annotation(item("pairwise", {"selected": "left"}), cancelled=True), right)) == [
        FIRST, NONE, NONE, (Reason.DISAGREEMENT,), SECOND, SECOND]


def test_label_studio_with_several_controls() -> None:
    both = [annotation(item("choices", {"choices": [choice]}, "quality"), item("rating", {"rating": 3}, "stars"),
                       item("textarea", {"text": ["fine"]}, "why")) for choice in ("Good", "Bad")]
    tasks = [task(one_of, **one()) for one_of in both]
    assert refused("unpaired", *tasks) == (
        "f:1: several labels: 'quality', 'stars'. Choose one with --label-name quality.")
    assert rows("unpaired", *tasks, label_name="quality") == [UP, DOWN]
    assert rows("unpaired", *tasks, label_name="stars", label_threshold=4) == [DOWN, DOWN]
    assert rows("unpaired", *tasks, {**tasks[0], "annotations": []}, label_name="quality")[-1] == NONE
    twice = task(annotation(item("choices", {"choices": ["Good", "Bad"]})), **one())
    assert refused("unpaired", twice).startswith("f:1: 'pw' has several choices")
    assert "--label-name has no effect on trl" in refused("unpaired", {
        "prompt": "p", "completion": "x", "label": True}, label_name="label")


def test_label_studio_min() -> None:
    """JSON-MIN and CSV: the data beside the controls, one record for each annotation."""
    def least(**more: Any) -> dict[str, Any]:
        return {"id": 1, "annotator": 1, "annotation_id": 7, "created_at": "2021", "updated_at": "2021",
                "lead_time": 2.5, "prompt": "p", **more}

    sides = [least(answer1="x", answer2="y", pw=value) for value in (
        [{"selected": "left"}], '[{"selected": "right"}]', "left", "")]
    assert read("paired", *sides)[0] == "label-studio"
    assert rows("paired", *sides) == [FIRST, SECOND, FIRST, NONE]
    named = [least(answer1="x", answer2="y", preference=value) for value in ("left", "right")]
    assert (read("paired", *named)[0], rows("paired", *named)) == ("label-studio", [FIRST, SECOND])
    labels = [least(response="x", quality=value, sentiment="dull") for value in ("Good", "Bad", None)]
    assert rows("unpaired", *labels) == [UP, DOWN, NONE]
    assert refused("unpaired", *labels, least(response="x", quality="Meh")).startswith("f:4: quality 'Meh' is not")
    stars = [least(response="x", stars=[{"rating": number}]) for number in (5, 1)]
    assert rows("unpaired", *stars, label_threshold=3) == [UP, DOWN]
    assert rows("unpaired", *(least(response="x", grade=value) for value in "uv"), label_name="grade",
                labels="u=true,v=false") == [UP, DOWN]


# --- Argilla ---------------------------------------------------------------------------------------------------------


def record(responses: Any, suggestions: Any = None, **given: Any) -> dict[str, Any]:
    return {"id": "1", "fields": given or {"prompt": "p", "response": "x"}, "metadata": {}, "vectors": {},
            "suggestions": suggestions or {}, "responses": responses, "status": "completed", "_server_id": "s"}


def said(*values: Any, status: str | None = None) -> list[dict[str, Any]]:
    return [{"value": value, "user_id": "u", **({"status": status} if status else {})} for value in values]


def test_argilla_labels() -> None:
    name, found = read("unpaired", record({"quality": said("good")}), record({"quality": said("bad")}))
    assert (name, [short(row) for row in found]) == ("argilla", [UP, DOWN])
    assert view_of(raw(record({"quality": said("good")}))) == "unpaired"
    assert rows("unpaired", record({"quality": said("yes", "no", "yes")}), record({"quality": said("yes", "no")}),
                record({}), record({"quality": said("no", status="discarded")})) == [
        UP, (Reason.DISAGREEMENT,), NONE, NONE]
    assert rows("unpaired", record({"stars": said(5)}), record({"stars": said(1, 2)}), label_threshold=3) == [UP, DOWN]
    of_server = [{"id": "r", "status": status, "user_id": "u", "values": {"quality": {"value": value}}}
                 for status, value in (("submitted", "good"), ("draft", "bad"))]
    assert rows("unpaired", record(of_server), record({"quality": said("bad")})) == [UP, DOWN]


def test_argilla_pairs() -> None:
    two = {"instruction": "p", "response_1": "x", "response_2": "y"}
    chat = [(["u: p"], ["a: x"], ["a: y"]), (["u: p"], ["a: y"], ["a: x"])]
    assert rows("paired", record({"preference": said("response_1")}, **two),
                record({"preference": said("response_2")}, **two), record({"preference": said("tie")}, **two)) == [
        *chat, (Reason.TIE,)]
    ranked = [[{"value": "response_1", "rank": one_of}, {"value": "response_2", "rank": 1}] for one_of in (2, 1)]
    assert rows("paired", *(record({"order": said(value)}, **two) for value in ranked)) == [chat[1], (Reason.TIE,)]


def test_argilla_flattened() -> None:
    """The export of `to_list(flatten=True)` and of `to_datasets`, also as CSV."""
    def flat(**more: Any) -> dict[str, Any]:
        return {"id": "1", "status": "completed", "_server_id": "s", "prompt": "p", "response": "x", **more}

    records = [flat(**{"q.responses": [value], "q.responses.users": ["u"], "q.responses.status": ["submitted"]})
               for value in ("good", "bad")]
    assert read("unpaired", *records)[0] == "argilla"
    assert rows("unpaired", *records, flat(**{"q.responses": None})) == [UP, DOWN, NONE]
    mixed = flat(**{"q.responses": '["bad", "good"]', "q.responses.status": '["discarded", "submitted"]'})
    assert rows("unpaired", mixed, records[1]) == [UP, DOWN]
    guessed = [flat(**{"q.suggestion": value, "q.suggestion.score": 0.9, "q.suggestion.agent": "gpt"})
               for value in ("good", "bad")]
    assert rows("unpaired", *guessed, records[0], records[1]) == [NONE, NONE, UP, DOWN]
    assert rows("unpaired", *guessed, label_name="q.suggestion") == [UP, DOWN]
    nested = [record({}, {"q": {"value": value, "score": 0.9, "agent": "gpt"}}) for value in ("good", "bad")]
    assert rows("unpaired", *nested, label_name="q.suggestion") == [UP, DOWN]


def test_argilla_with_a_comment() -> None:
    """Free text is no label, so the question beside it is the only one; two questions need a choice."""
    commented = [record({"why": said("It is a fine one."), "quality": said(value)}) for value in ("good", "bad")]
    assert rows("unpaired", *commented) == [UP, DOWN]
    two = [record({"tone": said("good"), "quality": said(value)}) for value in ("good", "bad")]
    assert refused("unpaired", *two).startswith("f:1: several labels: 'tone', 'quality'. Choose one with --label-name")
    assert rows("unpaired", *two, label_name="quality") == [UP, DOWN]
    turns = [record({"tone": said("good")}), record({"quality": said("bad")})]
    assert "f:2: the label is 'quality', but that of earlier rows is 'tone'" in refused("unpaired", *turns)


# --- Open WebUI ------------------------------------------------------------------------------------------------------


def message(name: str, parent: str | None, role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"id": name, "parentId": parent, "childrenIds": [], "role": role, "content": text, "timestamp": 1, **more}


def rated(rating: Any, wanted: str = "4", chat: dict[str, Any] | None = None, **data: Any) -> dict[str, Any]:
    known = [message("1", None, "user", "p"), message("2", "1", "assistant", "x", model="m"),
             message("3", "1", "assistant", "y", model="n"), message("4", "3", "user", "q"),
             message("5", "4", "assistant", "z", model="n", done=True, annotation={"rating": 1})]
    history = {"messages": {one_of["id"]: one_of for one_of in known}, "currentId": "5"}
    return {"id": "f1", "user_id": "u", "version": 0, "type": "rating",
            "data": {"rating": rating, "model_id": "n", "sibling_model_ids": None, "reason": "", "comment": "",
                     "tags": [], "details": {"rating": 7}, **data},
            "meta": {"arena": False, "model_id": "n", "message_id": wanted, "message_index": 2, "chat_id": "c"},
            "snapshot": {"chat": {"id": "c", "title": "t", "chat": {
                "models": ["n"], "params": {}, "history": history, "messages": known, **(chat or {})}}},
            "created_at": 1, "updated_at": 1}


def test_open_webui() -> None:
    """Each rated message with the branch that leads to it."""
    name, found = read("unpaired", rated(1, "5"), rated(-1, "2"), rated("1", "3", sibling_model_ids=["m"]),
                       rated(0, "2"), rated(None, "2"), rated(1, "9"))
    assert (name, [short(row) for row in found]) == ("open-webui", [
        (["u: p", "a: y", "u: q"], ["a: z"], True), (["u: p"], ["a: x"], False), (["u: p"], ["a: y"], True),
        (Reason.TIE,), NONE, (Reason.MISSING_FIELD,)])
    assert view_of(raw(rated(1))) == "unpaired"
    assert [short(row) for row in read("paired", rated(-1, "2"), rated(1, "3"), pair_by_prompt=True)[1]] == [
        (["u: p"], ["a: y"], ["a: x"])]


def test_open_webui_prompts() -> None:
    assert rows("unpaired", rated(1, "2", {"params": {"system": "s"}})) == [(["s: s", "u: p"], ["a: x"], True)]
    flat = {"history": {}, "messages": [message("1", None, "user", "p"), message("2", None, "assistant", "x")]}
    assert rows("unpaired", rated(1, "2", flat)) == [(["u: p"], ["a: x"], True)]
    file = {"history": {}, "messages": [message("1", None, "user", "p", files=[{"type": "image"}]),
                                        message("2", "1", "assistant", "x")]}
    assert rows("unpaired", rated(1, "2", file)) == [(Reason.MISSING_FIELD,)]
    assert refused("unpaired", rated(1, "4")).startswith("f:1: the rated message is from 'user', not the assistant")
    assert refused("unpaired", rated("great", "2")).startswith("f:1: rating 'great' is not 1 or -1")
    loop = {"messages": [], "history": {"messages": {"1": message("1", "2", "user", "p"),
                                                     "2": message("2", "1", "assistant", "x")}}}
    assert rows("unpaired", rated(1, "2", loop))  # ends


# --- Langfuse --------------------------------------------------------------------------------------------------------


def score(value: Any, kind: str = "NUMERIC", name: str = "feedback", **more: Any) -> dict[str, Any]:
    return {"id": "s", "name": name, "value": value, "dataType": kind, "source": "API", "traceId": "t", "comment": None,
            **more}


def trace(*scores: dict[str, Any], asked: Any = "p", told: Any = "x", **more: Any) -> dict[str, Any]:
    return {"id": "t", "timestamp": "2024-05-29T13:46:19.963Z", "name": "chat", "input": asked, "output": told,
            "sessionId": None, "userId": "u", "tags": ["web", "beta"], "metadata": {}, "latency": 1.2,
            "scores": list(scores), **more}


def test_langfuse_scores() -> None:
    name, found = read("unpaired", trace(score(1)), trace(score(0)), trace())
    assert (name, [short(row) for row in found]) == ("langfuse", [UP, DOWN, NONE])
    assert view_of(raw(trace(score(1)))) == "unpaired"
    assert rows("unpaired", trace(score(1, "BOOLEAN", stringValue="True")), trace(score(0.0, "BOOLEAN"))) == [UP, DOWN]
    words = [trace(score(None, "CATEGORICAL", stringValue=word)) for word in ("helpful", "not helpful")]
    assert rows("unpaired", *words) == [UP, DOWN]
    assert rows("unpaired", trace(score(1.0)), trace(score(0.0))) == [UP, DOWN]
    assert rows("unpaired", trace(score(0.9)), trace(score(0.2)), label_threshold=0.5) == [UP, DOWN]
    assert "--label-threshold NUMBER" in refused("unpaired", trace(score(0.9)), trace(score(0.2)))
    assert rows("unpaired", trace(score(1), score(0), score(1)), trace(score(1), score(0))) == [
        UP, (Reason.DISAGREEMENT,)]


def test_langfuse_names_and_owners_of_scores() -> None:
    """Scores of observations inside a trace are not those of the trace."""
    both = [trace(score(value), score(0.3, name="toxicity")) for value in (1, 0)]
    assert refused("unpaired", *both).startswith("f:1: several labels: 'feedback', 'toxicity'. Choose one")
    assert rows("unpaired", *both, label_name="feedback") == [UP, DOWN]
    assert read("unpaired", *both, label_name="feedbak")[1][0].detail == (
        "no label 'feedbak', only 'feedback', 'toxicity'")
    assert rows("unpaired", trace(score(0, observationId="o"), score(1, observationId=None)),
                trace(score(0, observationId="t"))) == [UP, DOWN]


def test_langfuse_tables() -> None:
    """The export of a table: a column per score with a list of its values; in CSV as JSON text."""
    def line(value: Any, **more: Any) -> dict[str, Any]:
        found = {key: one_of for key, one_of in trace().items() if key != "scores"}
        return {**found, "bookmarked": False, "user-feedback": value, "comments": ["ok"], **more}

    assert rows("unpaired", line([1]), line([0]), line(None), line('["1"]'), line("")) == [UP, DOWN, NONE, UP, NONE]
    assert read("unpaired", line([1]), line([0]))[0] == "langfuse"
    two = [line([value], quality=[0.4]) for value in (1, 0)]
    assert "several labels: 'user-feedback', 'quality'" in refused("unpaired", *two)
    assert rows("unpaired", *two, label_name="user-feedback") == [UP, DOWN]
    asked = json.dumps({"messages": [user("p")]})
    assert rows("unpaired", line([1], input=asked, output=json.dumps(answer("x"))), line([0])) == [
        (["u: p"], ["a: x"], True), DOWN]


@pytest.mark.parametrize(("asked", "told"), [
    ([user("p")], answer("x")), ({"messages": [user("p")]}, [answer("x")]), (user("p"), {"choices": [{
        "index": 0, "message": answer("x")}]}), ({"messages": [user("p")], "model": "m"}, "x")])
def test_langfuse_messages(asked: Any, told: Any) -> None:
    assert rows("unpaired", trace(score(1), asked=asked, told=told)) == [(["u: p"], ["a: x"], True)]


def test_langfuse_objects() -> None:
    assert rows("unpaired", trace(score(1), asked={"query": "p"}, told={"answer": "x"})) == [UP]
    said_of = refused("unpaired", trace(score(1), asked={"args": ["p"], "kwargs": {}}))
    assert said_of.startswith("f:1: 'input' is an object with 'args', 'kwargs', not text or messages")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    (row,) = read("unpaired", trace(score(1), asked={"messages": [user("p")], "tools": tools}))[1]
    assert row.tools == tuple(tools)


def test_imitation_takes_the_desirable_ones() -> None:
    """SFT does not train on a trace that was rated down, although it has an input and an output."""
    for records in ([trace(score(1)), trace(score(0)), trace()], [rated(1, "2"), rated(-1, "3"), rated(None, "2")]):
        assert [one_of[0] if len(one_of) == 1 else "kept" for one_of in rows("single", *records)] == [
            "kept", Reason.UNDESIRABLE, Reason.NO_LABEL]
    assert [short(row) for row in read("single", *(trace(score(value)) for value in (1, 0)), format="openrlhf")[1]] == [
        ("p", "x"), ("p", "x")]


# --- OpenAI ----------------------------------------------------------------------------------------------------------


def test_openai_preferences() -> None:
    """The published shape, with the optional keys."""
    line = {"input": {"messages": [user("p")], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [answer("x")], "non_preferred_output": [answer("y")]}
    name, found = read("paired", line)
    assert (name, [short(row) for row in found]) == ("openai", [(["u: p"], ["a: x"], ["a: y"])])


# --- files that are not what they seem -------------------------------------------------------------------------------

JUNK = [None, True, 0, -1.5, float("nan"), "", "x", "[1]", "{}", [], {}, [None], [{}], {"a": 1}, [1, "a"]]


def replaced(value: Any) -> Iterator[Any]:
    """The value with each of its parts replaced by each piece of junk."""
    yield from JUNK
    if isinstance(value, dict):
        yield from ({**value, key: new} for key, part in value.items() for new in replaced(part))
    elif isinstance(value, list):
        yield from ([*value[:place], new, *value[place + 1:]]
                    for place, part in enumerate(value) for new in replaced(part))


@pytest.mark.parametrize(("view", "intact"), [
    ("paired", task(annotation(item("pairwise", {"selected": "left"})))), ("unpaired", rated(1, "2")),
    ("unpaired", task(annotation(item("choices", {"choices": ["yes"]})), **one())), ("unpaired", trace(score(1))),
    ("unpaired", record({"q": said(True)}, {"q": {"value": "no"}})),
    ("unpaired", record([{"values": {"q": {"value": 1}}}])),
    ("paired", {"prompt": "p", "response_a": "x", "response_b": "y", "winner": "a"})])
def test_damaged_exports(view: Any, intact: dict[str, Any]) -> None:
    """D1: whatever a part is, the row is read, dropped with a reason, or refused with its place."""
    for damaged in replaced(intact):
        if isinstance(damaged, dict) and damaged:
            with suppress(DataError):
                read(view, intact, damaged)
