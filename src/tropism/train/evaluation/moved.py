"""The held-out completions whose reward rose or fell most in training, with their text."""

from typing import Any

from tropism.train.evaluation.row_files import HeldOutScores

EACH_WAY = 6
_LONGEST = 2000  # characters of a prompt, from its end, and of a completion, from its start


def moved_lines(held_out: HeldOutScores, tokenizer: Any) -> list[dict[str, Any]]:
    """Lines of `moved.jsonl`: completions by how much their reward changed, the largest rise first.

    Without rewards the log-prob per token takes their place. At most `EACH_WAY` rose and as many fell.
    """
    rows, columns = held_out.rows, list(held_out.columns())
    sides = len(columns) // max(len(rows), 1)
    changes = []
    for number, scores in enumerate(columns):
        row, side = rows[number // sides], number % sides
        names = ("reward_before", "reward_after") if scores["reward_after"] is not None else (
            "logps_before", "logps_after")
        before, after = (scores[name] for name in names)
        assert before is not None
        assert after is not None
        length = 1 if names[0] == "reward_before" else row.completions[side].length
        changes.append(((after - before) / length, number))
    changes.sort(key=lambda change: (-change[0], change[1]))
    rose = [change for change in changes if change[0] > 0][:EACH_WAY]
    fell = [change for change in changes if change[0] < 0][-EACH_WAY:]
    found = []
    for change, number in (*rose, *fell):
        row, side = rows[number // sides], number % sides
        label = ("chosen", "rejected")[side] if sides == 2 else {True: "desirable", False: "undesirable"}.get(
            row.desirable)  # type: ignore[arg-type]
        prompt = tokenizer.decode(row.prompt_ids.tolist(), skip_special_tokens=False)
        completion = tokenizer.decode(row.completions[side].ids.tolist(), skip_special_tokens=True)
        found.append({"id": row.id, "place": row.place, "label": label, "change": change,
                      **{name: value for name, value in columns[number].items() if value is not None},
                      "prompt": prompt[-_LONGEST:], "completion": completion[:_LONGEST]})
    return found
