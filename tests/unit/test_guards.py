"""Guards: what they say, when, and that a resumed run says the same. Records are made by hand."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from tropism.methods.build import build_method
from tropism.train.monitor.guards import AGAIN, GUARDS, LARGE_MARGIN, WINDOW, ZEROS, Guards, Notice, Subject

DPO = Subject("paired", ("sigmoid",), beta=0.1, has_reference=True)
KTO = Subject("unpaired", ("kto",), beta=0.1, has_reference=True)
SIMPO = Subject("paired", ("simpo",), beta=2.0, per_token=True)
SFT = Subject("single", ("sft",))


def said(subject: Subject, records: Iterable[dict[str, float]]) -> list[Notice]:
    guards = Guards(subject)
    return [notice for step, record in enumerate(records, start=1) for notice in guards.see(step, record)]


def healthy(step: int) -> dict[str, float]:
    """A DPO run as it should be: the loss falls, chosen rises, rejected falls."""
    noise = 0.01 * (-1) ** step
    return {"loss": 0.69 - 0.005 * step + noise, "rewards/chosen": 0.01 * step, "rewards/rejected": -0.02 * step,
            "rewards/margins": 0.03 * step, "logps/chosen": -100.0 + 3 * noise, "grad_norm": 1.0, "saturated": 0.0}


def test_a_healthy_run_is_left_in_peace() -> None:
    assert said(DPO, map(healthy, range(100))) == []


def test_a_gradient_of_zero_for_three_records_is_told_of() -> None:
    """N4: exactly 0, three in a row; and again when it has lasted twice as long."""
    records = [{"loss": 1.0, "grad_norm": norm} for norm in (0, 0, 1e-30, 0, 0, 0, 0, 0, 0)]
    notices = said(DPO, records)
    assert [(notice.step, notice.guard) for notice in notices] == [(6, "zero_gradient"), (9, "zero_gradient")]
    assert f"exactly 0 for {ZEROS} records" in notices[0].text
    assert notices[0].text.startswith("step 6: ")


def test_a_margin_above_fifty_nats_is_told_of() -> None:
    """N4: at once; again at twice the size, not every step."""
    margins = [10.0, LARGE_MARGIN, 51.0, 60.0, 101.9, 102.0, 103.0]
    notices = said(DPO, [{"rewards/margins": margin} for margin in margins])
    assert [notice.step for notice in notices] == [3, 6]
    assert "51 nats, above 50" in notices[0].text
    assert "--beta" in notices[0].text


def falling(step: int) -> dict[str, float]:
    """Both sides lose likelihood, the rejected one faster."""
    return {**healthy(step), "rewards/chosen": -0.05 * step, "rewards/rejected": -0.2 * step,
            "rewards/margins": 0.15 * step, "logps/chosen": -100.0 - 0.5 * step}


@pytest.mark.parametrize(("subject", "remedies"), [
    (DPO, ("--loss sigmoid,sft", "apo_zero", "--beta", "--learning-rate")),
    (KTO, ("--loss kto,sft", "desirable completions")),
    (Subject("paired", ("sigmoid", "sft"), 0.1, True), ("Try --loss apo_zero,",)),
])
def test_chosen_that_falls_while_margins_grow_is_told_of(subject: Subject, remedies: tuple[str, ...]) -> None:
    notices = [notice for notice in said(subject, map(falling, range(40))) if notice.guard == "chosen_falls"]
    # reward -0.05 a step at beta 0.1 is 0.5 nats a step; the mean of 10 records lies 4.5 steps back; clear is 10 nats
    assert notices[0].step == 26
    assert all(remedy in notices[0].text for remedy in remedies)
    assert len(notices) == 1  # the next is due at 20 nats


def test_chosen_that_falls_without_margins_is_something_else() -> None:
    assert not [notice for notice in said(DPO, ({**falling(step), "rewards/margins": 0.0} for step in range(60)))
                if notice.guard == "chosen_falls"]


def test_without_a_reference_windows_of_log_probs_are_compared() -> None:
    """Rows differ between records, so a fall within the noise says nothing."""
    noisy = [{"logps/chosen": -100.0 + 40 * (-1) ** step, "rewards/margins": 0.01 * step} for step in range(100)]
    assert said(SIMPO, noisy) == []
    clear = [{**record, "logps/chosen": -100.0 - 2 * step} for step, record in enumerate(noisy)]
    assert {notice.guard for notice in said(SIMPO, clear)} == {"chosen_falls"}


def test_with_another_model_as_the_reference_windows_are_compared() -> None:
    """Its log-ratios differ from row to row at the start already, so a first record says little."""
    other = replace(DPO, from_start=False)
    lucky = [{"rewards/chosen": 5.0 if step == 0 else 0.5 * (-1) ** step, "rewards/margins": 0.1 * step,
              "logps/chosen": -100.0} for step in range(100)]
    assert [notice.guard for notice in said(DPO, lucky)] == ["chosen_falls"]
    assert said(other, lucky) == []
    assert "chosen_falls" in {notice.guard for notice in said(other, map(falling, range(60)))}


def test_short_completions_fall_by_a_share() -> None:
    """Two nats of twenty are clear; of a hundred they are not."""
    def records(start: float) -> list[dict[str, float]]:
        return [{"rewards/chosen": -0.03 * step, "rewards/margins": 0.1 * step, "logps/chosen": start}
                for step in range(15)]

    assert [notice.guard for notice in said(DPO, records(-20.0))] == ["chosen_falls"]
    assert said(DPO, records(-100.0)) == []


def test_a_policy_far_from_its_reference_is_told_of() -> None:
    """KTO by its own KL, others by the size of the rewards; measured from the start."""
    kto = said(KTO, [{"kl/raw": float(10 * step)} for step in range(30)])
    assert [notice.guard for notice in kto] == ["far_from_reference"] * 3  # at 55, 115 and 235 nats
    assert "kl/raw" in kto[0].text
    dpo = said(DPO, [{"rewards/chosen": 0.0, "rewards/rejected": -0.8 * step} for step in range(30)])
    assert [notice.guard for notice in dpo] == ["far_from_reference"]
    assert "mean |log-ratio|" in dpo[0].text
    assert said(KTO, [{"kl/raw": 300.0} for _ in range(30)]) == []  # another model as the reference
    assert said(SIMPO, [{"rewards/chosen": 0.0, "rewards/rejected": -0.8 * step} for step in range(30)]) == []


def test_saturated_examples_are_told_of() -> None:
    notices = said(DPO, [{"saturated": 0.4 if step < 10 else 0.9} for step in range(40)])
    assert [(notice.step, notice.guard) for notice in notices] == [(13, "saturated")]
    assert "55% of the pairs" in notices[0].text


@pytest.mark.parametrize("subject", [DPO, KTO, SFT])
def test_a_rising_loss_is_told_of(subject: Subject) -> None:
    losses = [0.5 + (0.0 if step < 20 else 0.02 * (step - 20)) for step in range(80)]
    notices = said(subject, [{"loss": loss + 0.001 * (-1) ** step} for step, loss in enumerate(losses)])
    assert {notice.guard for notice in notices} == {"loss_rises"}
    assert "is rising" in notices[0].text
    assert "has diverged to" in notices[-1].text
    assert "--learning-rate" in notices[0].text
    assert len(notices) <= 5


def test_a_noisy_loss_does_not_rise() -> None:
    assert said(SFT, [{"loss": 1.0 + 0.8 * (-1) ** (step // 2)} for step in range(200)]) == []


@pytest.mark.parametrize("cut", [0, 1, 7, 13, 25, 39])
def test_a_resumed_run_says_the_same_at_the_same_steps(cut: int) -> None:
    """C1: the state goes through JSON, as a checkpoint holds it."""
    records: list[dict[str, Any]] = [{**falling(4 * step), "loss": 0.5 + 0.02 * step, "saturated": 0.02 * step,
                                      "grad_norm": 0.0 if step > 30 else 1.0} for step in range(40)]
    straight = said(DPO, records)
    assert {notice.guard for notice in straight} >= {"chosen_falls", "saturated", "loss_rises", "zero_gradient"}
    before = Guards(DPO)
    notices = [notice for step, record in enumerate(records[:cut], 1) for notice in before.see(step, record)]
    after = Guards(DPO)
    after.restore(json.loads(json.dumps(before.state())))
    notices += [notice for step, record in enumerate(records[cut:], cut + 1) for notice in after.see(step, record)]
    assert notices == straight


def test_a_value_that_is_not_finite_or_absent_is_passed_over() -> None:
    """K4: a class that a step does not have is absent from its record."""
    assert said(KTO, [{"loss": float("nan"), "kl/raw": float("inf")}, {}] * WINDOW) == []
    assert AGAIN > 1


def test_subjects_of_methods() -> None:
    def subject(view: Any, loss: str) -> Subject:
        return Subject.of(build_method(view, {"loss": loss}, [True, False]))

    assert subject("paired", "sigmoid") == DPO
    assert not Subject.of(build_method("paired", {"loss": "sigmoid"}, []), "some/model").matched
    assert subject("unpaired", "kto") == KTO
    assert subject("paired", "simpo") == SIMPO
    assert subject("single", "sft") == SFT
    assert set(GUARDS) == {"zero_gradient", "large_margin", "chosen_falls", "far_from_reference", "saturated",
                           "loss_rises"}
