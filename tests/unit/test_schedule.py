"""Which rows each step takes: a pure function of data, options, seed and step."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import case_yaml
from tropism.data.schedule import Schedule
from tropism.errors import UsageError

PROMPTS = st.lists(st.integers(0, 5), min_size=1, max_size=40).map(tuple)
GOLDEN = [[5, 3, 2, 1], [6, 9, 0, 8], [4, 7], [6, 2, 1, 9], [7, 0, 3, 5], [4, 8]]
GOLDEN_GROUPED = [[2, 4], [3, 0, 1], [5]]

OPTIONS = st.fixed_dictionaries({
    "batch_size": st.integers(1, 12), "seed": st.integers(0, 2**63), "epochs": st.integers(1, 3),
    "shuffle": st.booleans(), "group_prompts": st.booleans()})


def steps(schedule: Schedule) -> list[list[int]]:
    return [schedule.step(number) for number in range(1, schedule.total_steps + 1)]


def epochs_of(schedule: Schedule) -> list[list[list[int]]]:
    """Steps by epoch, told apart by `epochs_after`."""
    found: list[list[list[int]]] = [[]]
    for number, rows in enumerate(steps(schedule), start=1):
        found[-1].append(rows)
        if schedule.epochs_after(number) == len(found):
            found.append([])
    return found[:-1]


@given(PROMPTS, OPTIONS)
def test_each_epoch_is_a_permutation(prompts: tuple[int, ...], options: dict) -> None:
    """C1, X1: every row once per epoch, and no step crosses an epoch."""
    schedule = Schedule(prompts, **options)
    epochs = epochs_of(schedule)
    assert len(epochs) == options["epochs"]
    for epoch in epochs:
        assert sorted(row for step in epoch for row in step) == list(range(len(prompts)))


@given(PROMPTS, OPTIONS)
def test_steps_are_full_except_the_last(prompts: tuple[int, ...], options: dict) -> None:
    """DESIGN, Rows and steps: rows are taken until the step holds at least `batch_size`; the short last step stays."""
    schedule = Schedule(prompts, **options)
    for epoch in epochs_of(schedule):
        for step in epoch[:-1]:
            assert len(step) >= options["batch_size"]
            if not options["group_prompts"]:
                assert len(step) == options["batch_size"]
        assert len(epoch[-1]) >= 1
        if not options["group_prompts"]:
            assert len(epoch[-1]) == (len(prompts) - 1) % options["batch_size"] + 1


@given(PROMPTS, OPTIONS, st.randoms(use_true_random=False))
def test_a_step_depends_on_its_number_only(prompts: tuple[int, ...], options: dict, random) -> None:
    """C1: asked in any order, and of a fresh object each time, step k is the same rows: its state is one integer."""
    straight = steps(Schedule(prompts, **options))
    numbers = list(range(1, len(straight) + 1))
    random.shuffle(numbers)
    shared = Schedule(prompts, **options)
    for number in numbers[:5]:
        assert shared.step(number) == straight[number - 1] == Schedule(prompts, **options).step(number)


@given(PROMPTS, OPTIONS, st.integers(1, 30))
def test_max_steps_wins_over_epochs(prompts: tuple[int, ...], options: dict, max_steps: int) -> None:
    """DESIGN, Rows and steps: `max_steps` cuts or extends; the steps both plans have are the same."""
    planned, limited = Schedule(prompts, **options), Schedule(prompts, **options, max_steps=max_steps)
    assert limited.total_steps == max_steps
    common = min(max_steps, planned.total_steps)
    assert steps(limited)[:common] == steps(planned)[:common]
    with pytest.raises(IndexError):
        limited.step(max_steps + 1)
    with pytest.raises(IndexError):
        limited.step(0)


@given(PROMPTS, OPTIONS)
def test_group_prompts_keeps_prompts_together(prompts: tuple[int, ...], options: dict) -> None:
    """DESIGN, Rows and steps: all rows of a prompt stand in one step, side by side, in file order."""
    schedule = Schedule(prompts, **{**options, "group_prompts": True})
    for epoch in epochs_of(schedule):
        order = [row for step in epoch for row in step]
        for prompt in set(prompts):
            where = [order.index(row) for row in range(len(prompts)) if prompts[row] == prompt]
            assert where == list(range(where[0], where[0] + len(where)))
            assert sum(any(prompts[row] == prompt for row in step) for step in epoch) == 1


@given(PROMPTS.filter(lambda prompts: len(set(prompts)) > 1), OPTIONS.filter(lambda o: o["batch_size"] > 1))
def test_a_kto_step_has_two_prompts(prompts: tuple[int, ...], options: dict) -> None:
    """K1: a step waits for a second prompt; rows are neither lost nor reordered by the waiting."""
    waiting, plain = Schedule(prompts, **options, needs_partners=True), Schedule(prompts, **options)
    for epoch, unhurried in zip(epochs_of(waiting), epochs_of(plain), strict=True):
        assert [row for step in epoch for row in step] == [row for step in unhurried for row in step]
        assert all(len({prompts[row] for row in step}) > 1 for step in epoch)
        assert all(len(step) >= options["batch_size"] for step in epoch[:-1])


def test_waiting_and_remainder_in_numbers() -> None:
    """K1: the first step waits for a second prompt; a remainder of one prompt joins the step before it."""
    def cut(*prompts: int) -> list[list[int]]:
        return steps(Schedule(prompts, 2, 0, shuffle=False, needs_partners=True))

    assert cut(0, 0, 0, 1, 2, 3) == [[0, 1, 2, 3], [4, 5]]
    assert cut(0, 1, 2, 3, 4) == [[0, 1], [2, 3, 4]]
    assert cut(0, 1, 2, 2, 2) == [[0, 1, 2, 3, 4]]
    assert cut(0, 1, 2, 2, 3) == [[0, 1], [2, 3, 4]]
    assert cut(0, 0, 1) == [[0, 1, 2]]
    assert cut(0, 1, 2, 3, 4, 5) == [[0, 1], [2, 3], [4, 5]]


def test_a_remainder_of_two_prompts_stays() -> None:
    """DESIGN, Rows and steps: a short last step that can have partners is a step of its own."""
    schedule = Schedule(tuple(range(8)), 6, 0, shuffle=False, needs_partners=True)
    assert steps(schedule) == [[0, 1, 2, 3, 4, 5], [6, 7]]


def test_case_04_refusals_and_tail() -> None:
    """K4: a batch of one, or one prompt, is refused with the reason; a tail of one joins the step before."""
    with pytest.raises(UsageError, match=r"--batch-size 1 .*two prompts"):
        Schedule((0, 1, 2, 3), 1, 0, needs_partners=True)
    with pytest.raises(UsageError, match="all 3 rows have the same prompt"):
        Schedule((7, 7, 7), 2, 0, needs_partners=True)
    rows = case_yaml("04-kto-degenerate-sizes.yaml")["c_tail_of_one"]["rows"]
    assert steps(Schedule(tuple(range(len(rows))), 4, 0, shuffle=False, needs_partners=True)) == [[0, 1, 2, 3, 4]]
    # Neither matters to a method without partners.
    assert Schedule((7, 7, 7), 1, 0).total_steps == 3


def test_file_order_without_shuffle() -> None:
    """DESIGN, Rows and steps: `--shuffle false` keeps file order in every epoch."""
    schedule = Schedule(tuple(range(5)), 2, seed=3, epochs=2, shuffle=False)
    assert steps(schedule) == [[0, 1], [2, 3], [4], [0, 1], [2, 3], [4]]


def test_golden_order() -> None:
    """C1: the same numbers on every platform and in every release: a resumed run relies on it."""
    schedule = Schedule(tuple(range(10)), 4, seed=11, epochs=2)
    assert steps(schedule) == GOLDEN
    grouped = Schedule((0, 0, 1, 2, 1, 3), 2, seed=11, group_prompts=True)
    assert steps(grouped) == GOLDEN_GROUPED


def test_orders_differ_by_seed_and_epoch() -> None:
    """C1: epoch 2 of seed 0 is neither epoch 1 of seed 0 nor any epoch of seed 1."""
    orders = [tuple(row for step in epoch for row in step)
              for seed in range(4) for epoch in epochs_of(Schedule(tuple(range(30)), 7, seed, epochs=3))]
    assert len(set(orders)) == 12


def test_epochs_after_counts_rows() -> None:
    """DESIGN, Records: epochs as a fraction of rows, rising to a whole number at each epoch's end."""
    schedule = Schedule(tuple(range(5)), 2, 0, epochs=2)
    found = [schedule.epochs_after(number) for number in range(1, 7)]
    assert found == [0.4, 0.8, 1.0, 1.4, 1.8, 2.0]
    assert all(first < second for first, second in pairwise(found))
