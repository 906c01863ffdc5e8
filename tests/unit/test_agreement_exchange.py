"""How processes compare what they are: rows, weights, the exchange itself and its error. Threads play them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from helpers import row
from tropism.distributed import World
from tropism.distributed.agreement import Fact, check_same, differences
from tropism.errors import DataError, TropismError, UsageError
from tropism.train.setup.agreement import check_weights, facts_of_rows


class Table:
    """Where threads put an object each."""

    def __init__(self, size: int) -> None:
        self.barrier, self.brought = threading.Barrier(size, timeout=20), [None] * size

    def bring(self, rank: int, value: Any) -> list[Any]:
        self.barrier.wait()
        self.brought[rank] = value
        self.barrier.wait()
        return list(self.brought)


@dataclass(frozen=True)
class Seat(World):
    """A process, played by a thread."""

    table: Any = None

    def gather(self, value: Any) -> list[Any]:
        return self.table.bring(self.rank, value)

    def together(self, action: Callable[[], Any]) -> Any:
        try:
            result, failure = action(), None
        except TropismError as error:
            result, failure = None, error
        if failed := [error for error in self.gather(failure) if error is not None]:
            raise failure or failed[0]
        return result


def errors(task: Callable[[World], None], size: int = 2) -> list[str]:
    """What each process raises; empty where one raises nothing."""
    table, found = Table(size), [""] * size

    def run(rank: int) -> None:
        try:
            task(Seat(rank, size, torch.device("cpu"), table=table))
        except (UsageError, DataError) as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_process_names_what_differs() -> None:
    found = errors(lambda world: check_same(world, lambda: {"--seed": Fact.of(world.rank), "same": Fact.of(1)}))
    assert found == ["the processes of this run differ in:\n  --seed: process 0 has 0, process 1 has 1\n"
                     "Start all of them with the same options, files and versions."] * 2
    assert errors(lambda world: check_same(world, lambda: {"--seed": Fact("3", f"shown by {world.rank}")})) == ["", ""]


def test_an_error_of_one_process_is_raised_on_all() -> None:
    def describe(rank: int) -> dict[str, Fact]:
        if rank:
            raise DataError("data.jsonl: cannot be read")
        return {}

    assert errors(lambda world: check_same(world, lambda: describe(world.rank))) == ["data.jsonl: cannot be read"] * 2


def test_one_process_describes_nothing() -> None:
    def describe() -> dict[str, Fact]:
        raise AssertionError

    check_same(World(0, 1, torch.device("cpu")), describe)


def test_many_processes_are_listed_in_groups() -> None:
    """At most three values, with ranges of processes."""
    def seeds(*values: Any) -> str:
        line, = differences([{} if value is None else {"--seed": Fact.of(value)} for value in values])
        return line.removeprefix("--seed: ")

    assert seeds(*[1] * 6, 2, 1) == "processes 0-5, 7 have 1, process 6 has 2"
    assert seeds(1, None, 1) == "processes 0, 2 have 1, process 1 has none"
    assert seeds(*range(8)) == "process 0 has 0, process 1 has 1, process 2 has 2, 5 processes more"


def test_many_differences_are_counted() -> None:
    found = errors(lambda world: check_same(
        world, lambda: {f"--option-{number}": Fact.of(world.rank) for number in range(13)}))
    assert found[0].count("--option-") == 10
    assert "\n  and 3 other differences\n" in found[0]


def test_details_of_what_differs_are_left_out() -> None:
    one, other = {"--model": Fact.of("a"), "--model: config.json": Fact.of("x"), "--model-x": Fact.of("y")}, {}
    assert [line.partition(": process")[0] for line in differences([one, other])] == ["--model", "--model-x"]


def test_a_long_value_is_cut() -> None:
    """And values that look alike are told apart by a hash."""
    line, = differences([{"--system-prompt": Fact.of("a" * 10_000)}, {}])
    assert len(line) < 300
    line, = differences([{"--system-prompt": Fact.of(text)} for text in ("a  b\nc", "a b c")])
    one, other = line.removeprefix("--system-prompt: process 0 has ").split(", process 1 has ")
    assert one != other
    assert one.startswith("a b c (")
    assert other.startswith("a b c (")


ROWS = [row([1, 2, number], [5, number], desirable=bool(number % 2)) for number in range(3, 9)]


@pytest.mark.parametrize(("other", "name"), [
    (ROWS[:-1], "--data"), ([*ROWS, ROWS[0]], "--data"), ([*ROWS[:-1], replace(ROWS[-1], desirable=True)], "--data"),
    ([*ROWS[:-1], row([1, 2, 8], [5, 9], desirable=False)], "--data"),
    ([*ROWS[:-1], replace(ROWS[-1], split_key=b"another conversation")], "--data"),
    ([*ROWS[:-1], replace(ROWS[-1], prompt_key=b"another prompt before it was cut")], "--data"),
    ([*ROWS[:-1], replace(ROWS[-1], partner=ROWS[0].completions[0])], "--data"),
    (ROWS[::-1], "--data: order of the rows"), ([ROWS[1], ROWS[0], *ROWS[2:]], "--data: order of the rows")])
def test_rows_that_differ(other: list[Any], name: str) -> None:
    line, = differences([facts_of_rows("--data", "a.jsonl", ROWS), facts_of_rows("--data", "b.jsonl", other)])
    assert line.startswith(f"{name}: process 0 has a.jsonl: 6 rows")
    assert f"process 1 has b.jsonl: {len(other)} rows" in line


def test_the_same_rows_may_have_other_names() -> None:
    same = [replace(one, id="other", place="other.jsonl:1") for one in ROWS]
    assert not differences([facts_of_rows("--data", "a", ROWS), facts_of_rows("--data", "b", same)])


def test_weights_that_differ_are_named() -> None:
    def module(rank: int) -> torch.nn.Module:
        torch.manual_seed(0)
        made = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        if rank:
            made[1].bias.data[1] += 1
        return made

    modules = [module(0), module(1)]
    for found in errors(lambda world: check_weights(world, "model", modules[world.rank])):
        assert found.count("process 0 has") == 1
        assert "  model: 1.bias: process 0 has " in found
    assert errors(lambda world: check_weights(world, "model", modules[0])) == ["", ""]
