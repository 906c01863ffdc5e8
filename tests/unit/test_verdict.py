"""The verdict on a run: what it rests on, and how often it is wrong."""

from functools import partial

import numpy as np
import pytest

from tropism.observe.verdict import Verdict, judge_improvement, judge_ranking
from tropism.train.evaluation.bootstrap import accuracy, auc, resamples, with_interval

FIRST = {"rewards/auc": 0.5, "rewards/auc_low": 0.5, "rewards/auc_high": 0.5}


def last(low: float, high: float, key: str = "rewards/auc", **baselines: float) -> dict[str, float]:
    return {key: (low + high) / 2, f"{key}_low": low, f"{key}_high": high,
            **{f"baselines/{name}": value for name, value in baselines.items()}}


@pytest.mark.parametrize(("first", "record", "word", "names"), [
    (FIRST, last(0.51, 0.7), "learned", "0.605 (95%: 0.510 to 0.700)"),
    (FIRST, last(0.5, 0.7), "not shown", "0.5"),
    (FIRST, last(0.6, 0.7, length=0.55), "learned", "0.550"),
    (FIRST, last(0.6, 0.7, length=0.65), "not shown", "baseline length (0.650)"),
    (FIRST, last(0.6, 0.7, logps=0.3, logps_per_token=0.62), "not shown", "baseline logps_per_token (0.620)"),
    (FIRST, last(0.3, 0.49), "got worse", "0.500"),
    (FIRST, last(0.501, 0.7), "not shown", "0.5"),
    (FIRST, last(0.3, 0.5), "not shown", "0.5"),
    ({"rewards/accuracies": 0.7}, last(0.6, 0.69, "rewards/accuracies"), "got worse", "0.700"),
    ({"rewards/accuracies": 0.7}, last(0.6, 0.8, "rewards/accuracies"), "not shown", "before training (0.700)"),
    ({"rewards/accuracies": 0.3}, last(0.35, 0.45, "rewards/accuracies"), "not shown", "0.5"),
    (FIRST, {"rewards/auc": 0.9}, "not shown", "without an interval"),
    (FIRST, last(float("nan"), 0.7), "not shown", "without an interval")])
def test_a_ranking(first: dict[str, float], record: dict[str, float], word: str, names: str) -> None:
    found = judge_ranking(first, record, 50)
    assert found is not None
    assert found.word == word
    assert names in found.why
    assert str(found).startswith(f"verdict: {word}: ")
    assert Verdict.read(found.to_json()) == found


def test_few_prompts_show_nothing() -> None:
    """An interval over few resampled prompts is too narrow: at 10 rows it misses 0.5 in 4% of all cases."""
    assert judge_ranking(FIRST, last(0.8, 0.9), 19).word == "not shown"  # type: ignore[union-attr]
    assert judge_ranking(FIRST, last(0.8, 0.9), 20).word == "learned"  # type: ignore[union-attr]
    assert judge_improvement("the loss", 1.0, 0.5, 1.5, 19).word == "not shown"


@pytest.mark.parametrize(("low", "high", "word"), [(0.1, 0.2, "learned"), (0.0, 0.2, "not shown"),
                                                   (-0.1, 0.1, "not shown"), (-0.2, -0.1, "got worse")])
def test_an_improvement(low: float, high: float, word: str) -> None:
    assert judge_improvement("the loss", (low + high) / 2, low, high, 20).word == word


def test_records_without_a_ranking_have_no_verdict() -> None:
    assert judge_ranking({"loss": 1.0}, {"loss": 0.5}, 100) is None


@pytest.mark.parametrize("found", [None, "learned", {}, {"word": "great", "why": ""}, {"word": "learned"}])
def test_a_foreign_manifest_has_no_verdict(found: object) -> None:
    assert Verdict.read(found) is None


def synthetic(kind: str, effect: float, rows: int, generator: np.random.Generator) -> str:
    """The verdict on random rewards whose classes differ by an effect, in standard deviations; baselines are chance."""
    drawn = list(resamples(range(rows)))
    if kind == "accuracies":
        statistics = [partial(accuracy, generator.normal(shift, size=rows)) for shift in (effect, 0, 0, 0)]
    else:
        good = np.arange(rows) % 2 == 0
        statistics = [partial(auc, generator.normal(size=rows) + shift * good, good) for shift in (effect, 0, 0, 0)]
    key = f"rewards/{kind}"
    record = with_interval(key, statistics[0]()[0], np.concatenate([statistics[0](weights) for weights in drawn]))
    record |= {f"baselines/{number}": float(one()[0]) for number, one in enumerate(statistics[1:])}
    found = judge_ranking({key: 0.5}, record, rows)
    assert found is not None
    return found.word


@pytest.mark.some(3)
@pytest.mark.parametrize("kind", ["auc", "accuracies"])
@pytest.mark.parametrize(("rows", "effect", "least", "most"), [
    (20, 0.0, 0, 5), (60, 0.0, 0, 5), (200, 0.0, 0, 5), (60, 0.3, 1, 120), (60, 1.5, 190, 200), (200, 1.5, 200, 200)])
def test_how_often_it_says_learned(kind: str, rows: int, effect: float, least: int, most: int) -> None:
    """200 sets: without an effect at most 2.5% are called learned, with a large one nearly all."""
    generator = np.random.default_rng(3)
    words = [synthetic(kind, effect, rows, generator) for _ in range(200)]
    assert least <= words.count("learned") <= most
    assert words.count("got worse") <= (10 if effect == 0 else 2)
