"""How much the loss of held-out rows fell: by hand, and where it is not finite."""

import math
from dataclasses import replace

import pytest
import torch

from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion, token_ids
from tropism.losses.scored import Scored
from tropism.methods.build import build_method
from tropism.train.evaluation.improvement import improvement, verdict_on
from tropism.train.evaluation.row_files import HeldOutScores

METHOD = build_method("single", {"loss": "sft"}, [None])
LENGTHS = [1, 2, 3, 2] * 6


def rows() -> list[EncodedRow]:
    found = []
    for number, length in enumerate(LENGTHS):
        ids = token_ids([number, 7])
        completion = Completion(token_ids([5] * length), torch.ones(length, dtype=torch.bool).numpy())
        found.append(EncodedRow(str(number), str(number), ids, (completion,), None, ids.tobytes()))
    return found


def scored(per_token: float) -> Scored:
    lengths = torch.tensor(LENGTHS)
    return Scored(per_token * lengths.double(), torch.zeros(len(LENGTHS), dtype=torch.float64), lengths)


def test_it_is_per_token() -> None:
    """Each token gained 0.5 nats, so every resample says the same."""
    assert improvement(METHOD, rows(), scored(-2.0), scored(-1.5)) == pytest.approx((0.5, 0.5, 0.5))
    held_out = HeldOutScores(rows(), scored(-2.0), scored(-1.5), METHOD)
    assert verdict_on(held_out, {"loss": 2.0}, {"loss": 1.5}).word == "learned"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_loss_that_is_not_finite_shows_nothing(value: float) -> None:
    after = scored(-1.5)
    after = replace(after, logps=torch.where(torch.arange(len(LENGTHS)) == 3, value, after.logps))
    held_out = HeldOutScores(rows(), scored(-2.0), after, METHOD)
    found = verdict_on(held_out, {"loss": 2.0}, {"loss": 1.5})
    assert (found.word, "not finite" in found.why) == ("not shown", True)
