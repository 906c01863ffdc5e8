"""K1: nobody is their own partner for KTO's reference point."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from helpers import case_rows, case_yaml, expected
from tropism.data.batching.pack import partners
from tropism.data.schedule import Schedule

PROMPTS = st.lists(st.integers(0, 4), min_size=2, max_size=40).filter(lambda prompts: len(set(prompts)) > 1)


@given(PROMPTS)
@example([0, 1])
@example([0, 0, 1])
@example([0, 1, 1])
@example([1, 0, 0, 0, 0])
def test_partner_is_the_next_unit_of_another_prompt(prompts: list[int]) -> None:
    """K1: by brute force: walk on, cyclically, until the prompt differs. Never oneself, never the own prompt."""
    count = len(prompts)
    for position, partner in enumerate(partners(prompts)):
        walk = next(step for step in range(1, count) if prompts[(position + step) % count] != prompts[position])
        assert partner == (position + walk) % count
        assert partner != position
        assert prompts[partner] != prompts[position]


@pytest.mark.parametrize("count", range(2, 12))
def test_distinct_prompts_are_shifted_by_one(count: int) -> None:
    """K1: odd and even sizes alike; the middle unit of an odd step does not meet itself."""
    assert partners(range(count)) == [*range(1, count), 0]


def test_case_01() -> None:
    """K1: five rows, so a reversal would pair the third with itself."""
    rows = [raw.record for raw in case_rows("01-kto-odd-batch-pairing.jsonl")]
    found = partners([record["prompt"] for record in rows])
    assert {rows[i]["id"]: rows[j]["id"] for i, j in enumerate(found)} == expected("01")["valid_pairing_example"]


def test_case_06() -> None:
    """K1: two shuffled epochs of seven rows in steps of four: every partner is another row of the same step."""
    case = case_yaml("06-kto-shuffle-partners.yaml")
    prompts = [record["prompt"] for record in case["rows"]]
    numbers = {prompt: number for number, prompt in enumerate(prompts)}
    schedule = Schedule(tuple(numbers[prompt] for prompt in prompts), 4, case["run"]["seed"], case["run"]["epochs"],
                        needs_partners=True)
    seen = [[], []]
    for step in range(1, schedule.total_steps + 1):
        rows = schedule.step(step)
        seen[0 if step <= schedule.total_steps // 2 else 1] += rows
        for row, partner in zip(rows, (rows[j] for j in partners([prompts[i] for i in rows])), strict=True):
            assert partner in rows
            assert partner != row
    assert sorted(seen[0]) == sorted(seen[1]) == list(range(expected("06")["rows_per_epoch"]))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("prompts", [["a"], ["a", "a", "a"], []])
def test_one_prompt_has_no_partner(prompts: list[str]) -> None:
    """K4: refused, instead of a KL of 0 from pairing a row with itself."""
    with pytest.raises(ValueError, match="two distinct prompts"):
        partners(prompts)
