"""X1, C1: one of two processes is killed or its disk fails: the other ends too, and both resume to the same bytes."""

import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.chaos.conftest import assert_same
from integration.chaos.faults import Fault, operations, ranks
from processes import free_port

Arguments = Callable[..., list[object]]


def _run(arguments: list[object], faults: list[Fault], output: Path) -> list[int | None]:
    with free_port() as port:
        return ranks(arguments, faults, port, output)


@pytest.mark.slow
def test_faults_of_one_rank(tmp_path: Path, arguments: Arguments, figures: Counter[str]) -> None:
    straight, log = tmp_path / "straight" / "run", tmp_path / "log"
    straight.parent.mkdir()
    count = Fault(below=(str(straight), str(straight.parent / "store")), log=str(log))
    assert _run(arguments(straight), [count, Fault()], tmp_path / "said") == [0, 0]
    total = operations(log)
    for operation in range(1, total + 1, max(1, total // 20)):
        for kind in ("kill", "full"):
            place = tmp_path / f"{kind}{operation}"
            place.mkdir()
            run = place / "run"
            fault = Fault(kind, operation, (str(run), str(place / "store")))
            began = time.monotonic()
            codes = _run(arguments(run), [fault, Fault()], tmp_path / "said")
            assert None not in codes, (kind, operation, codes)
            assert time.monotonic() - began < 90
            figures[f"rank faults ({kind})"] += 1
            said = (tmp_path / "said.1").read_text()
            assert kind == "kill" or "Traceback" not in said, said
            assert _run(arguments(run), [Fault(), Fault()], tmp_path / "said") == [0, 0], (kind, operation)
            assert_same(run, straight)
            shutil.rmtree(place)
