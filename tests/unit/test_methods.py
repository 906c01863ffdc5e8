"""A method at work: losses of units, denominators, first-step values, rewards and metrics."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import case_yaml, expected, row
from tropism.data.rows import EncodedRow
from tropism.data.tree import Completion
from tropism.losses import Scored
from tropism.losses.aot import partners
from tropism.methods import LOSSES, Method, StepInputs, Units
from tropism.methods.build import build_method

LABELS = [True, False, True, True, False, False]
LOGRATIOS = [2.0, -3.0, 4.0, -1.5, 5.0, -0.5]
LN2 = math.log(2)
NOTHING = StepInputs()


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def nothing(count: int) -> Tensor:
    """No rounding noise."""
    return torch.zeros(count, dtype=torch.float64)


def method_of(view: Any, loss: str, labels: Any = (), **options: Any) -> Method:
    return build_method(view, {"loss": loss, **options}, labels)


def fixture(rows: list[int]) -> tuple[Scored, Units]:
    """Rows of the published KTO fixture with their own completions, ready for a gradient."""
    reference = doubles(*(-(20 + 3 * i + 2 * i) for i in rows))
    policy = (reference + doubles(*(LOGRATIOS[i] for i in rows))).requires_grad_()
    scored = Scored(policy, reference, torch.ones(len(rows), dtype=torch.int64))
    return scored, Units(torch.arange(len(rows))[:, None], torch.tensor([LABELS[i] for i in rows]))


def one_pair(reference: bool = True) -> tuple[Scored, Units]:
    """The published pair."""
    inputs = case_yaml("21-pref-loss-table.yaml")["inputs"]
    policy, anchor, lengths = ([inputs[f"{what}_{side}"] for side in ("chosen", "rejected")]
                               for what in ("policy", "ref", "len"))
    scored = Scored(doubles(*policy), doubles(*anchor) if reference else nothing(2), torch.tensor(lengths))
    return scored, Units(torch.tensor([[0, 1]]), None)


def means_of(method: Method, scored: Scored, units: Units, wide: StepInputs = NOTHING,
             **changes: Any) -> dict[str, float]:
    """The record that one pack makes."""
    count = len(units.members)
    counts = changes.get("counts", (count,) * len(method.terms))
    losses = method.losses(scored, units, wide)
    sums = method.metrics(scored, units, losses, counts, changes.get("noise", nothing(len(scored.logps))))
    return method.combine({key: float(total.detach()) / int(n) for key, (total, n) in sums.items() if int(n)})


# --- losses of units --------------------------------------------------------------------------------------------------


def test_units_choose_completions_of_shared_trees() -> None:
    """L1: several units may look at one completion, in any order; each gets its own loss."""
    scored = Scored(doubles(-1.0, -2.0, -4.0), doubles(-1.5, -1.0, -4.5), torch.tensor([1, 2, 3]))
    units = Units(torch.tensor([[2, 1], [0, 1], [1, 0], [2, 1]]), None)
    losses, = method_of("paired", "sigmoid", beta=0.5).losses(scored, units, NOTHING)
    margins = 0.5 * doubles(0.5 + 1.0, 0.5 + 1.0, -1.0 - 0.5, 0.5 + 1.0)
    torch.testing.assert_close(losses, torch.log1p(torch.exp(-margins)), rtol=0, atol=1e-12)


def test_each_term_has_its_own_options_and_inputs_from_the_step() -> None:
    """L2, L3: a mixture is the losses side by side, in their order."""
    scored, units = one_pair()
    mixed = method_of("paired", "simpo,ipo,aot,sft", beta=0.1, simpo_gamma=0.25)
    wide = StepInputs(partner=doubles(2.5))
    alone = [method_of("paired", "simpo", beta=0.1, simpo_gamma=0.25), method_of("paired", "ipo"),
             method_of("paired", "aot")]
    wanted = [method.losses(scored, units, wide)[0] for method in alone]
    for got, want in zip(mixed.losses(scored, units, wide), [*wanted, doubles(12.0)], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert float(wanted[2]) == pytest.approx(math.log1p(math.exp(-0.1 * (3.0 - 2.5))))


def test_likelihood_of_unpaired_data_is_that_of_desirable_completions() -> None:
    """L1: an undesirable completion is not imitated, and gets no gradient from the term."""
    scored, units = fixture([0, 1, 3])
    _, likelihood = method_of("unpaired", "kto,sft").losses(scored, units, StepInputs(reference_point=doubles(0.0)[0]))
    assert likelihood.tolist() == [18.0, 0.0, 36.5]
    gradient, = torch.autograd.grad(likelihood.sum(), scored.logps)
    assert gradient.tolist() == [-1.0, 0.0, -1.0]


def test_divergence_of_each_view() -> None:
    """DESIGN, Gradient: both sides of a pair are distilled, and completions of either label."""
    away = doubles(0.5, 0.25, 2.0)
    scored = Scored(doubles(-1.0, -2.0, -4.0), nothing(3), torch.tensor([1, 2, 3]), away)
    single = Units(torch.tensor([[2], [0]]), None)
    assert method_of("single", "sft", teacher="t").losses(scored, single, NOTHING)[1].tolist() == [2.0, 0.5]
    pairs = Units(torch.tensor([[0, 1], [2, 1]]), None)
    assert method_of("paired", "hinge", teacher="t").losses(scored, pairs, NOTHING)[1].tolist() == [0.75, 2.25]
    labeled = Units(torch.tensor([[0], [1], [2]]), torch.tensor([True, False, True]))
    method = method_of("unpaired", "kto_no_reference_point", teacher="t")
    assert method.losses(scored, labeled, NOTHING)[1].tolist() == [0.5, 0.25, 2.0]


def beginnings() -> tuple[Scored, Units]:
    """Two pairs, each with the beginnings of its sides: the rejected one is longer, then the chosen one."""
    scored = Scored(doubles(-4.0, -9.0, -5.0, -11.0, -3.0, -6.0), doubles(-5.0, -8.0, -4.0, -12.0, -4.0, -7.0),
                    torch.tensor([2, 5, 2, 6, 3, 3]))
    return scored, Units(torch.tensor([[0, 1, 0, 2], [3, 4, 5, 4]]), None)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_length_desensitised_sides(alpha: float) -> None:
    """L2: LD-DPO: the shared length counts in full, what exceeds it counts alpha, in policy and reference."""
    scored, units = beginnings()
    chosen, rejected = method_of("paired", "sigmoid", ld_alpha=alpha).sides(scored, units)
    torch.testing.assert_close(chosen.logps, doubles(-4.0, -6.0 + alpha * -5.0))
    torch.testing.assert_close(chosen.reference_logps, doubles(-5.0, -7.0 + alpha * -5.0))
    torch.testing.assert_close(rejected.logps, doubles(-5.0 + alpha * -4.0, -3.0))
    torch.testing.assert_close(rejected.reference_logps, doubles(-4.0 + alpha * -4.0, -4.0))
    assert (chosen.lengths.tolist(), rejected.lengths.tolist()) == ([2, 6], [5, 3])


def test_length_desensitising_leaves_a_likelihood_alone() -> None:
    """L2: the likelihood term is that of every chosen token, as its denominator is."""
    scored, units = beginnings()
    preference, likelihood = method_of("paired", "hinge,sft", ld_alpha=0.0, beta=0.5).losses(scored, units, NOTHING)
    assert likelihood.tolist() == [4.0, 11.0]
    assert preference.tolist() == [1 - 0.5 * (1.0 - -1.0), 1 - 0.5 * (1.0 - 1.0)]


def test_confidence_weighs_each_pair() -> None:
    """L2: WPO by hand: exp of both sides' mean of log p - log sum p^2; a constant, and not on the likelihood."""
    policy = doubles(-2.0, -3.0, -5.0).requires_grad_()
    scored = Scored(policy, doubles(-2.5, -2.0, -5.0), torch.tensor([1, 2, 3]), None,
                    doubles(-0.1, -0.7, 0.2).requires_grad_())
    units = Units(torch.tensor([[0, 1], [2, 0]]), None)
    weights = doubles(math.exp(-0.8), math.exp(0.1))
    plain = method_of("paired", "sigmoid,sft").losses(scored, units, NOTHING)
    weighed = method_of("paired", "sigmoid,sft", wpo=True).losses(scored, units, NOTHING)
    torch.testing.assert_close(weighed[0], weights * plain[0], rtol=0, atol=1e-15)
    torch.testing.assert_close(weighed[1], plain[1], rtol=0, atol=0)
    of_policy, of_confidence = torch.autograd.grad(weighed[0].sum(), (policy, scored.confidence), allow_unused=True,
                                                   retain_graph=True)
    assert of_confidence is None
    torch.testing.assert_close(of_policy, torch.autograd.grad((weights * plain[0]).sum(), policy)[0])


def test_confidence_of_beginnings_is_not_looked_at() -> None:
    """L2: WPO with LD-DPO: the weight is that of the whole completions."""
    scored, units = beginnings()
    sure = doubles(-0.1, -0.2, 7.0, -0.3, -0.4, 7.0)
    scored = Scored(scored.logps, scored.reference_logps, scored.lengths, None, sure)
    plain, = method_of("paired", "sigmoid", ld_alpha=0.5).losses(scored, units, NOTHING)
    weighed, = method_of("paired", "sigmoid", ld_alpha=0.5, wpo=True).losses(scored, units, NOTHING)
    torch.testing.assert_close(weighed, plain * doubles(math.exp(-0.3), math.exp(-0.7)))


# --- denominators -----------------------------------------------------------------------------------------------------


def masked(*bits: bool) -> Completion:
    whole = Completion.supervised(list(range(len(bits))))
    return Completion(whole.ids, whole.loss_mask & list(bits))


def with_completions(*completions: Completion, desirable: bool | None = None) -> EncodedRow:
    return EncodedRow("r", "r", row([1], [1]).prompt_ids, completions, desirable, b"")


def test_denominators_of_pairs() -> None:
    """L1: preferences by pairs, likelihood by the chosen side's supervised tokens, divergence by both sides'."""
    rows = [with_completions(masked(True, False, True), masked(True, True, True)),
            with_completions(masked(True), masked(False, True)), with_completions(masked(True, True), masked(True))]
    method = method_of("paired", "sigmoid,sft,aot", teacher="t")
    assert [term.row.name for term in method.terms] == ["sigmoid", "sft", "aot", "divergence"]
    assert method.counts(rows) == (3, 2 + 1 + 2, 3, 5 + 2 + 3)
    assert method.counts(entry.with_shared_lengths() for entry in rows) == method.counts(rows)
    assert method.counts([]) == (0, 0, 0, 0)


def test_denominators_of_single_completions() -> None:
    """L1: KTO by completions, its likelihood by desirable tokens, SFT and KD by all supervised tokens."""
    rows = [with_completions(masked(True, True, True), desirable=True),
            with_completions(masked(False, True), desirable=False), with_completions(masked(True), desirable=True)]
    assert method_of("unpaired", "kto,sft", teacher="t").counts(rows) == (3, 4, 5)
    assert method_of("single", "sft", teacher="t").counts(rows) == (5, 5)


def test_the_total_divides_each_term_by_its_own_count() -> None:
    """L1: sum of weight x sum / count over terms; a term without a token in the whole step adds nothing."""
    method = method_of("paired", "sigmoid,sft,hinge", loss_weights="1,0.2,3")
    losses = [doubles(1.0, 3.0), doubles(7.0, 14.0), doubles(0.5, 0.0)]
    assert float(method.total(losses, (4, 30, 4))) == pytest.approx(4 / 4 + 0.2 * 21 / 30 + 3 * 0.5 / 4)
    empty = method_of("unpaired", "bco,sft")
    assert float(empty.total([doubles(1.0, 2.0), doubles(0.0, 0.0)], (2, 0))) == 1.5
    halves = [method.total([part[i : i + 1] for part in losses], (4, 30, 4)) for i in (0, 1)]
    assert float(sum(halves)) == pytest.approx(float(method.total(losses, (4, 30, 4))))


# --- before step 1 ----------------------------------------------------------------------------------------------------

MEAN_WEIGHT = (4 * 1.1 + 2 * 1.33) / 6
SMOOTHED = 0.5 * (math.log(0.5) - math.log(0.9)) + 0.5 * (math.log(0.5) - math.log(0.1))
AT_START: dict[tuple[str, str], tuple[dict[str, Any], float]] = {
    ("paired", "sigmoid"): ({"label_smoothing": 0.1}, LN2), ("paired", "robust"): ({}, LN2),
    ("paired", "ipo"): ({"beta": 0.2}, 6.25), ("paired", "ipo_mean"): ({}, 25.0), ("paired", "hinge"): ({}, 1.0),
    ("paired", "exo_pair"): ({"label_smoothing": 0.1}, SMOOTHED), ("paired", "nca_pair"): ({}, 2 * LN2),
    ("paired", "bco_pair"): ({}, 2 * LN2), ("paired", "sppo_hard"): ({"beta": 0.2}, 12.5),
    ("paired", "apo_zero"): ({}, 1.0), ("paired", "apo_down"): ({}, 1.0),
    ("paired", "discopop"): ({}, 0.5 * LN2 + 0.5), ("paired", "sigmoid_norm"): ({}, LN2),
    ("paired", "aot"): ({}, LN2), ("paired", "aot_unpaired"): ({}, LN2),
    **{("unpaired", name): ({}, 0.5 * MEAN_WEIGHT) for name in ("kto", "apo_zero_unpaired", "kto_no_reference_point")},
    ("unpaired", "bco"): ({}, LN2 * MEAN_WEIGHT)}


def test_every_loss_with_a_reference_has_a_known_first_value() -> None:
    """R1: a new loss states its own."""
    assert AT_START.keys() == {(view, name) for view, rows in LOSSES.items() for name, loss in rows.items()
                               if loss.needs_reference}


CHANGES = [(view, name, change) for view, name in AT_START for change in (
    {}, {"f_divergence": "js"}, {"f_divergence": "forward_kl"}, {"ld_alpha": 0.3})
    if change.keys() <= {*LOSSES[view][name].options, *(["ld_alpha"] if view == "paired" else [])}]


@pytest.mark.parametrize(("view", "name", "change"), CHANGES)
def test_first_step_values(view: Any, name: str, change: dict[str, Any]) -> None:
    """R1, K5: what a loss costs while policy and reference agree, by hand, as predicted, and on random log-probs.

    No divergence of the tie and no length weighting changes it.
    """
    options, wanted = AT_START[view, name]
    weights = {"desirable_weight": 1.1, "undesirable_weight": 1.33} if view == "unpaired" else {}
    method = method_of(view, name, **{**options, **weights, **change})
    labels = [True, True, False, True, False, True]
    same = -40 * torch.rand(12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scored = Scored(same, same.clone(), torch.arange(1, 13))
    zero, margins = nothing(1)[0], same[:6] - same[6:]
    wide = StepInputs(zero, zero, partners(margins, margins), nothing(6), nothing(6))
    pairs = torch.stack((torch.arange(6), torch.arange(6, 12)), dim=1)
    units = (Units(torch.cat((pairs, pairs), 1), None) if view == "paired"
             else Units(torch.arange(6)[:, None], torch.tensor(labels)))
    assert float(method.losses(scored, units, wide)[0].mean()) == pytest.approx(wanted, abs=1e-12)
    assert method.loss_at_start([None] * 6 if view == "paired" else labels) == pytest.approx(wanted, abs=1e-12)


def test_the_first_value_of_several_losses() -> None:
    """R1: weighted, where each of them is known."""
    assert method_of("paired", "ipo,hinge", loss_weights="2,0.5").loss_at_start([None] * 3) == pytest.approx(50.5)


@pytest.mark.parametrize(("view", "loss", "options"), [
    ("paired", "simpo", {}), ("paired", "orpo", {}), ("paired", "cpo", {}), ("paired", "sigmoid,sft", {}),
    ("paired", "sigmoid,simpo", {}), ("paired", "sigmoid", {"wpo": True}), ("paired", "sigmoid", {"teacher": "t"}),
    ("unpaired", "kto,sft", {}), ("single", "sft", {}), ("single", "sft", {"teacher": "t"})])
def test_first_values_that_nobody_knows(view: Any, loss: str, options: dict[str, Any]) -> None:
    """R1: what depends on the policy's own log-probs is not foretold."""
    assert method_of(view, loss, **options).loss_at_start([True, False]) is None


# --- rewards and metrics ----------------------------------------------------------------------------------------------


def test_pair_metrics() -> None:
    """L2: logged rewards and margin of the published pair: 0.1, -0.1 and 0.2."""
    method = method_of("paired", "sigmoid")
    means, want = means_of(method, *one_pair()), expected("21")
    assert means.keys() == set(method.metric_keys)
    assert means == pytest.approx({
        "loss": want["sigmoid"], "rewards/chosen": want["reward_chosen"], "rewards/rejected": want["reward_rejected"],
        "rewards/margins": want["logged_margin"], "rewards/accuracies": 1.0, "logps/chosen": -12.0,
        "logps/rejected": -15.0, "saturated": 0.0}, abs=1e-6)


def test_rewards_of_losses_without_a_reference() -> None:
    """L2: beta x mean log-prob (SimPO, ORPO), beta x log-prob (CPO); a log-ratio as soon as one loss has it."""
    for loss, options, chosen, rejected in (
            ("simpo", {}, 2 * -12 / 6, 2 * -15 / 5), ("orpo", {"beta": 0.3}, 0.3 * -2, 0.3 * -3),
            ("cpo", {}, -1.2, -1.5), ("simpo,sigmoid", {"beta": 0.1}, 0.1, -0.1),
            ("sft,cpo,simpo", {"beta": 0.1}, -1.2, -1.5)):
        scored, units = one_pair(reference="sigmoid" in loss)
        rewards = method_of("paired", loss, **options).unit_rewards(scored, units)
        torch.testing.assert_close(rewards, doubles(chosen, rejected)[None])
    scored, units = one_pair(reference=False)
    means = means_of(method_of("paired", "simpo"), scored, units)
    assert means["loss"] == pytest.approx(expected("21")["simpo"], abs=1e-6)
    assert means["rewards/margins"] == pytest.approx(2.0)


def test_rewards_within_rounding_are_ties() -> None:
    """R1: a reward no larger than the noise of its log-prob is 0, so accuracy is one half before step 1."""
    scored = Scored(doubles(-5 + 1e-7, -6, -5, -6.0), doubles(-5, -6, -6, -6.0), torch.ones(4, dtype=torch.int64))
    method = method_of("paired", "sigmoid", beta=0.5)
    units = Units(torch.tensor([[0, 1], [2, 3], [1, 0], [3, 2]]), None)
    noise = torch.full((4,), 1e-6, dtype=torch.float64)
    assert means_of(method, scored, units, noise=noise)["rewards/accuracies"] == (0.5 + 1 + 0.5 + 0) / 4
    assert method.clear_rewards(scored, units, noise).tolist() == [[0, 0], [0.5, 0], [0, 0], [0, 0.5]]


def test_kto_metrics_count_each_class() -> None:
    """K4: rewards of case A by class are 0.15 and 0.05; an absent class is absent from the record."""
    method = method_of("unpaired", "kto", undesirable_weight=1.33)
    wide = StepInputs(reference_point=doubles(0.5)[0])
    means = means_of(method, *fixture(list(range(6))), wide)
    assert means.keys() == {*method.metric_keys, "rewards/margins"}
    assert means["loss"] == pytest.approx(0.569918842, abs=1e-9)
    assert (means["rewards/chosen"], means["rewards/rejected"]) == (pytest.approx(0.15), pytest.approx(0.05))
    assert means["rewards/margins"] == pytest.approx(0.10)
    assert (means["logps/chosen"], means["logps/rejected"]) == (pytest.approx(-80.5 / 3), pytest.approx(-108.5 / 3))
    one_sided = means_of(method, *fixture([0, 2, 3]), wide)
    assert one_sided.keys() == {"loss", "rewards/chosen", "logps/chosen", "saturated"}


def test_records_of_several_terms() -> None:
    """L2: each loss by its name, before its weight; their weighted sum is the loss."""
    scored, units = one_pair()
    means = means_of(method_of("paired", "sigmoid,sft", loss_weights="1,0.2"), scored, units, counts=(1, 6))
    assert (means["loss/sigmoid"], means["loss/sft"]) == (pytest.approx(0.598139, abs=1e-6), 2.0)
    assert means["loss"] == pytest.approx(0.598139 + 0.2 * 2.0, abs=1e-6)
    assert next(iter(means)) == "loss"
    method = method_of("unpaired", "bco,sft")
    absent = method.combine({"loss/bco": 0.5, "rewards/rejected": 1.0})  # a window without a desirable completion
    assert absent == {"loss": 0.5, "loss/bco": 0.5, "rewards/rejected": 1.0}


def test_perplexity_is_that_of_the_cross_entropy() -> None:
    """L2: of SFT's loss, of KD's cross-entropy before its weight; never of a preference method."""
    assert method_of("single", "sft").combine({"loss": 2.0}) == {"loss": 2.0, "perplexity": pytest.approx(math.exp(2))}
    record = method_of("single", "sft", teacher="t", kd_weight=0.25).combine({"kd/ce": 2.0, "kd/divergence": 4.0})
    assert record == {"loss": pytest.approx(0.75 * 2 + 0.25 * 4), "kd/ce": 2.0, "kd/divergence": 4.0,
                      "perplexity": pytest.approx(math.exp(2))}
    assert method_of("single", "sft").combine({"loss": 1e6})["perplexity"] < math.inf
    assert "perplexity" not in method_of("paired", "orpo").combine({"loss/orpo": 1.0, "loss/sft": 2.0})
