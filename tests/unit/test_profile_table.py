"""Where the time of a step went: each moment belongs to one part, and the parts sum to the step."""

import math
from typing import Any

import pytest

from tropism.train.profile_table import StepTimes, step_times


def op(name: str, start: float, end: float, thread: int = 1, number: int | None = None, cat: str = "cpu_op",
       external: int | None = None) -> dict[str, Any]:
    """An event between two times in seconds."""
    args = {"Sequence number": number, "External id": external}
    return {"ph": "X", "cat": cat, "name": name, "tid": thread, "ts": start * 1e6, "dur": (end - start) * 1e6,
            "args": {key: value for key, value in args.items() if value is not None}}


def span(name: str, start: float, end: float) -> dict[str, Any]:
    return op(f"tropism.{name}", start, end, cat="user_annotation")


STEP = [
    {"ph": "M", "name": "process_name"},
    span("step", 0, 20), span("data", 0, 1),
    span("forward", 2, 8), op("aten::linear", 2, 3, number=0), op("aten::mm", 2, 3, number=0),
    span("attention", 3, 5), op("aten::index_select", 3, 4, number=1), op("aten::mul", 5, 6, number=2),
    op("aten::scaled_dot_product_attention", 6, 7, number=3), op("aten::add", 7, 8, number=4),
    span("head", 8, 10), op("_LinearLogProb", 8, 10, number=5),
    span("backward", 10, 16),
    op("autograd::engine::evaluate_function: _LinearLogProbBackward", 10, 11, number=5), op("aten::mm", 10, 11),
    op("autograd::engine::evaluate_function: ScaledDotProductBackward0", 11, 12, number=3),
    op("ScaledDotProductFlashAttentionBackward0", 11, 12, number=3),
    op("autograd::engine::evaluate_function: IndexSelectBackward0", 12, 13, number=1), op("aten::index_add_", 12, 13),
    op("autograd::engine::evaluate_function: MmBackward0", 13, 15, number=0), op("aten::mm", 13, 14),
    span("optimizer", 16, 18), op("c10d::allreduce_", 16, 17), op("aten::_fused_adamw_", 17, 18),
]


def assert_whole(found: StepTimes) -> None:
    assert math.isclose(sum(found.parts.values()), found.seconds)
    assert found.rows()[-1][0] == "step"
    assert found.rows()[-1][2] == "100.0%"


def test_each_moment_belongs_to_the_innermost_part() -> None:
    found = step_times(STEP, 1)
    assert found.parts == pytest.approx({
        "data": 1, "forward": 3, "attention": 2 + 1 + 2, "head": 2 + 1, "backward": 3, "optimizer": 1,
        "communication": 1, "host": 3})
    assert_whole(found)
    name, seconds, calls = found.operations[0]
    assert (name, seconds, calls) == ("aten::mm", pytest.approx(3), 3)


def test_the_backward_pass_on_another_thread_counts_where_no_gpu_is() -> None:
    """Its time is the main thread's wait, which the span around it measures: nothing counts twice."""
    other = [{**event, "tid": 2} if event["name"].startswith("autograd") else event for event in STEP if "tid" in event]
    assert_whole(step_times(other, 1))


def test_a_wait_for_a_step_that_does_not_come_is_no_step() -> None:
    found = step_times([*STEP, span("step", 30, 31), span("data", 30, 31)], 1)
    assert (found.steps, found.seconds) == (1, pytest.approx(20))
    assert found.parts["data"] == pytest.approx(1)


def test_time_between_steps_does_not_count() -> None:
    later = [{**event, "ts": event["ts"] + 100e6} for event in STEP if "ts" in event]
    found = step_times([*STEP, op("aten::mm", 30, 90), *later], 2)
    assert found.rows() == step_times(STEP, 1).rows()
    assert found.seconds == pytest.approx(40)


def test_on_a_gpu_the_operation_that_runs_there_counts() -> None:
    """Computation counts before the communication that it hides, and both before the host."""
    found = step_times([
        span("step", 0, 10), span("data", 0, 1), span("forward", 1, 2), op("aten::mm", 1, 2, external=7),
        op("gemm", 2, 5, thread=9, cat="kernel", external=7),
        op("gemm", 4, 6, thread=8, cat="kernel", external=7),
        op("ncclDevKernel_AllGather", 3, 8, thread=7, cat="kernel", external=8),
        op("Memcpy HtoD", 9, 9.5, thread=9, cat="gpu_memcpy"), op("late", 9.5, 30, thread=9, cat="kernel", external=7),
    ], 1)
    assert found.parts == pytest.approx({"data": 1, "forward": 4.5, "attention": 0, "head": 0, "backward": 0,
                                         "optimizer": 0, "communication": 2, "host": 2.5})
    assert_whole(found)


def test_a_kernel_of_the_backward_thread_is_attributed() -> None:
    found = step_times([
        span("step", 0, 10), span("forward", 0, 1), span("attention", 0, 1), op("aten::bmm", 0, 1, number=4),
        span("backward", 1, 9),
        op("autograd::engine::evaluate_function: BmmBackward0", 2, 3, thread=2, number=4),
        op("aten::bmm", 2, 3, thread=2, external=5), op("aten::mm", 3, 4, thread=2, external=6),
        op("one", 4, 6, thread=9, cat="kernel", external=5), op("two", 6, 9, thread=9, cat="kernel", external=6),
    ], 1)
    assert (found.parts["attention"], found.parts["backward"]) == (pytest.approx(2), pytest.approx(3))
    assert_whole(found)
