"""A model that is spread over processes gives the weights and metrics of one process, however it is spread."""

from pathlib import Path
from typing import Any

import pytest

from integration.conftest import assert_same_metrics, distance, records, weights
from integration.test_invariance import BOUNDS, Bench, Left, bench, one_rank, run_ranks  # noqa: F401

TWO: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2}, "copies": {"shard": 1, "replicate": 2}, "summed once": {"reduce_once": True}}
FOUR: dict[str, dict[str, Any]] = {
    "shard": {}, "replicas": {"replicate": 2}, "shard and tensor": {"tensor": 2},
    "replicas of tensor": {"replicate": 2, "shard": 1, "tensor": 2}}
RUNS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    (name, precision): (method, {"precision": precision, **options})
    for precision in BOUNDS for name, (method, options) in {
        "kto": ("kto", {}), "dpo": ("dpo", {}), "sft": ("sft", {}), "kd": ("kd", {"teacher": "OTHER"})}.items()}


def compare(bench: Bench, base: Path, other: Path, precision: str) -> None:  # noqa: F811
    expected = weights(base / "model")
    travelled = distance(expected, weights(bench.model))
    assert travelled > 1e-3
    assert distance(weights(other / "model"), expected) / travelled < BOUNDS[precision][0], other
    assert_same_metrics(records(Left(other)), records(Left(base)), *BOUNDS[precision][1:])


def spread(bench: Bench, size: int, ways: dict[str, dict[str, Any]]) -> None:  # noqa: F811
    """Every run in one process, and spread in each way."""
    jobs, pairs = [], []
    for spec, (method, options) in RUNS.items():
        base = f"spread-{'-'.join(spec)}-base"
        if not (bench.folder / base / "model").exists():
            one_rank_here(bench, base, method, options)
        for way, parallel in ways.items():
            name = f"spread-{'-'.join(spec)}-{way}"
            jobs.append((method, bench.settings(name, method, **{**options, "microbatch_tokens": 64, "samples": 1,
                                                                  "parallel": parallel, "store": f"store-{way}"})))
            pairs.append((base, name, spec[1]))
    assert run_ranks(size, one_rank, jobs) == [0] * size
    for base, name, precision in pairs:
        compare(bench, bench.folder / base, bench.folder / name, precision)


def one_rank_here(bench: Bench, name: str, method: str, options: dict[str, Any]) -> None:  # noqa: F811
    from tropism.api import run
    from tropism.config import METHODS

    run(METHODS[method](**bench.settings(name, method, **options)))


def test_two_processes(bench: Bench) -> None:  # noqa: F811
    """X1, X2, L1: layers computed together, whole copies, gradients summed once; KTO, DPO, SFT and KD."""
    spread(bench, 2, TWO)


@pytest.mark.slow
def test_four_processes(bench: Bench) -> None:  # noqa: F811
    """X1, X2, L1: four shards, two replicas of two shards, and two of each axis with tensor parallel."""
    spread(bench, 4, FOUR)
