"""From options to a method: what is refused, what a name stands for, what is filled in and said."""

from typing import Any

import pytest

from tropism.errors import UsageError
from tropism.methods import LOSSES, Method
from tropism.methods.build import build_method, describe_method, effective
from tropism.methods.options import OPTIONS, check_options

PREFERENCES = [(view, name) for view in ("paired", "unpaired") for name, row in LOSSES[view].items() if row.reward]


def method_of(view: Any, loss: str, labels: Any = (), **options: Any) -> Method:
    """The method of options that go together."""
    check_options(view, {"loss": loss, **options})
    return build_method(view, {"loss": loss, **options}, labels)


def terms_of(method: Method) -> list[tuple[str, float, str]]:
    return [(term.row.name, pytest.approx(term.weight), term.key) for term in method.terms]


@pytest.mark.parametrize(("view", "options", "words"), [
    ("paired", {"loss": "hinge", "label_smoothing": 0.1}, ["--label-smoothing", "no effect", "loss hinge"]),
    ("paired", {"loss": "sigmoid", "simpo_gamma": 0.1}, ["--simpo-gamma", "no effect", "loss sigmoid"]),
    ("paired", {"loss": "sigmoid", "cpo_alpha": 1.0}, ["--cpo-alpha", "no effect", "loss sigmoid"]),
    ("paired", {"loss": "sigmoid,ipo", "discopop_tau": 0.1}, ["--discopop-tau", "no effect", "loss sigmoid,ipo"]),
    ("paired", {"loss": "nca_pair", "f_divergence": "js"}, ["--f-divergence", "no effect", "loss nca_pair"]),
    ("paired", {"loss": "sigmoid,nca_pair", "f_divergence": "js"}, ["--f-divergence js", "loss nca_pair"]),
    ("paired", {"loss": "ipo,simpo", "f_divergence": "js"}, ["--f-divergence js", "loss simpo"]),
    ("paired", {"loss": "sigmoid", "f_alpha": 0.3}, ["--f-alpha", "no effect", "--f-divergence reverse_kl"]),
    ("paired", {"loss": "sigmoid", "f_divergence": "js", "f_alpha": 0.3}, ["--f-alpha", "--f-divergence js"]),
    ("paired", {"loss": "exo_pair", "label_smoothing": 0.0}, ["--label-smoothing 0", "loss exo_pair"]),
    ("paired", {"loss": "simpo", "reference": "live"}, ["reference", "no effect", "loss simpo"]),
    ("paired", {"loss": "cpo,sft", "reference": "live"}, ["reference", "no effect", "loss cpo,sft"]),
    ("paired", {"loss": "orpo", "ld_alpha": 0.5}, ["--ld-alpha", "loss orpo"]),
    ("paired", {"loss": "sigmoid,simpo", "ld_alpha": 0.5}, ["--ld-alpha", "loss simpo"]),
    ("paired", {"loss": "aot", "wpo": True}, ["wpo", "loss aot"]),
    ("paired", {"loss": "sigmoid,aot_unpaired", "wpo": True}, ["wpo", "loss aot_unpaired"]),
    ("paired", {"loss": "sft"}, ["loss sft", "`tropism sft`"]),
    ("unpaired", {"loss": "sft"}, ["loss sft", "`tropism sft`"]),
    ("unpaired", {"loss": "kto,sft", "loss_weights": "1"}, ["--loss-weights", "1 weight for 2 losses"]),
    ("paired", {"loss": "sigmoid", "loss_weights": "1,2"}, ["--loss-weights", "2 weights for 1 loss"]),
    ("paired", {"loss": "sigmoid,sft", "loss_weights": "1,0"}, ["--loss-weights", "above 0"]),
    ("paired", {"loss": "sigmoid,sft", "loss_weights": "1,-1"}, ["--loss-weights", "above 0"]),
    ("paired", {"loss": "sigmoid,sft", "loss_weights": "1,nan"}, ["--loss-weights", "above 0"]),
    ("paired", {"loss": "sigmoid,sft", "loss_weights": "1,inf"}, ["--loss-weights", "above 0"]),
    ("paired", {"loss": "sigmoid,sft", "loss_weights": "1;2"}, ["--loss-weights", "'1;2'"]),
    ("paired", {"loss": "sigmiod"}, ["loss", "'sigmiod'", "Did you mean sigmoid?"]),
    ("unpaired", {"loss": "bcoo"}, ["loss", "'bcoo'", "Did you mean bco?"]),
    ("unpaired", {"loss": "sigmoid"}, ["loss", "'sigmoid' is not a known loss", "kto"]),
    ("paired", {"loss": "sigmoid,"}, ["loss", "''"]),
    ("paired", {"loss": "divergence"}, ["loss", "'divergence' is not a known loss"]),
    ("paired", {"loss": "ipo,sigmoid,ipo"}, ["loss", "ipo is named twice", "--loss-weights"]),
    ("unpaired", {"loss": "kto", "teacher": "t", "divergence_mix": 0.5}, ["--divergence-mix", "divergence forward_kl"]),
    ("single", {"loss": "sft", "teacher": "t", "divergence": "tvd", "divergence_mix": 0.5},
     ["--divergence-mix", "divergence tvd"]),
    *[("paired", {"loss": "sigmoid", name: value}, ["--" + name.replace("_", "-"), "no effect", "--teacher"])
      for name, value in (
        ("kd_weight", 0.0), ("divergence", "js"), ("divergence_mix", 0.5), ("temperature", 1.0),
        ("temperature_scaling", False), ("top_k", 5))],
])
def test_what_does_not_go_together_is_refused(view: Any, options: dict[str, Any], words: list[str]) -> None:
    """L3, H2: an option that would do nothing is refused; both options are named."""
    with pytest.raises(UsageError) as error:
        check_options(view, options)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(("view", "options"), [
    ("paired", {"loss": "sigmoid,hinge", "label_smoothing": 0.1}),  # one of them takes it
    ("paired", {"loss": "sigmoid,simpo", "reference": "live"}),
    ("paired", {"loss": "sigmoid", "f_divergence": "alpha", "f_alpha": 0.3}),
    ("paired", {"loss": "sigmoid,ipo,sft", "f_divergence": "js"}),
    ("paired", {"loss": "aot,sft", "ld_alpha": 0.5}),
    ("paired", {"loss": "orpo,sft", "wpo": True}),
    ("paired", {"loss": "aot", "wpo": False}),
    ("unpaired", {"loss": "kto,sft", "desirable_weight": "auto", "teacher": "t", "top_k": 5, "divergence": "skew",
                  "divergence_mix": 0.3}),
])
def test_what_goes_together_is_not(view: Any, options: dict[str, Any]) -> None:
    """L3: the refusals above are no wider than they must be."""
    check_options(view, options)


def test_options_of_losses_are_found_in_the_table() -> None:
    """L3: every option that some loss takes is checked for having an effect."""
    assert set(OPTIONS) == {"beta", "label_smoothing", "f_divergence", "f_alpha", "discopop_tau", "simpo_gamma",
                            "cpo_alpha", "desirable_weight", "undesirable_weight"}


# --- terms ------------------------------------------------------------------------------------------------------------


def test_one_loss_is_the_loss() -> None:
    """L2: its metric is `loss` itself, unless a weight makes the two differ."""
    assert terms_of(method_of("paired", "ipo")) == [("ipo", 1.0, "loss")]
    assert terms_of(method_of("paired", "ipo", loss_weights="0.5")) == [("ipo", 0.5, "loss/ipo")]
    assert terms_of(method_of("single", "sft")) == [("sft", 1.0, "loss")]


def test_losses_that_are_published_with_a_likelihood_have_it() -> None:
    """L2: ORPO = NLL + lambda x odds term; CPO = preference + cpo_alpha x NLL; a weight is for the whole loss."""
    assert terms_of(method_of("paired", "orpo")) == [("orpo", 1.0, "loss/orpo"), ("sft", 1.0, "loss/sft")]
    assert terms_of(method_of("paired", "orpo", loss_weights="0.5")) == [
        ("orpo", 0.5, "loss/orpo"), ("sft", 0.5, "loss/sft")]
    assert method_of("paired", "orpo", beta=0.3).terms[0].options == {"beta": 0.3}
    assert terms_of(method_of("paired", "cpo")) == [("cpo", 1.0, "loss/cpo"), ("sft", 1.0, "loss/sft")]
    assert terms_of(method_of("paired", "cpo", cpo_alpha=0.25, loss_weights="2")) == [
        ("cpo", 2.0, "loss/cpo"), ("sft", 0.5, "loss/sft")]


@pytest.mark.parametrize(("losses", "weights", "wanted"), [
    ("cpo,sft", "2,0.5", {"cpo": 2.0, "sft": 2 * 0.25 + 0.5}),
    ("sft,cpo", "0.5,2", {"cpo": 2.0, "sft": 2 * 0.25 + 0.5}),
    ("orpo,cpo", "3,1", {"orpo": 3.0, "cpo": 1.0, "sft": 3 + 0.25}),
])
def test_one_likelihood_term(losses: str, weights: str, wanted: dict[str, float]) -> None:
    """L1: a likelihood that was named and also belongs to a loss is one term, with the sum of the weights."""
    method = method_of("paired", losses, loss_weights=weights, cpo_alpha=0.25)
    assert {term.row.name: term.weight for term in method.terms} == pytest.approx(wanted)
    assert len({term.key for term in method.terms}) == len(method.terms)


def test_several_losses_have_a_weight_and_a_metric_each() -> None:
    """L2: `sigmoid,sft` with weights 1,0.2."""
    assert terms_of(method_of("paired", "sigmoid,sft", loss_weights="1,0.2")) == [
        ("sigmoid", 1.0, "loss/sigmoid"), ("sft", 0.2, "loss/sft")]
    assert terms_of(method_of("unpaired", "bco,sft")) == [("bco", 1.0, "loss/bco"), ("sft", 1.0, "loss/sft")]


def test_distillation_alone_shares_and_added_to_another_method_adds() -> None:
    """DESIGN, Gradient: kd is (1 - w) CE + w D, other methods L + w D; w is 0.5 by default."""
    assert terms_of(method_of("single", "sft", teacher="t")) == [("sft", 0.5, "kd/ce"),
                                                                  ("divergence", 0.5, "kd/divergence")]
    assert terms_of(method_of("single", "sft", teacher="t", kd_weight=0.9)) == [("sft", 0.1, "kd/ce"),
                                                                               ("divergence", 0.9, "kd/divergence")]
    assert terms_of(method_of("paired", "sigmoid", teacher="t", kd_weight=0.3)) == [
        ("sigmoid", 1.0, "loss/sigmoid"), ("divergence", 0.3, "kd/divergence")]
    assert terms_of(method_of("unpaired", "kto,sft", teacher="t", kd_weight=0.0)) == [
        ("kto", 1.0, "loss/kto"), ("sft", 1.0, "loss/sft"), ("divergence", 0.0, "kd/divergence")]


def test_what_a_method_needs() -> None:
    """DESIGN 1: reference, teacher and step-wide inputs follow from the rows of the table."""
    def needs(view: Any, loss: str, **options: Any) -> set[str]:
        method = method_of(view, loss, **options)
        asked = {"teacher"} if any(term.row.needs_teacher for term in method.terms) else set()
        return asked | ({"shift"} if method.needs("shift") else set()) | {
            name for name in ("reference", "reference_point", "sorting") if getattr(method, f"needs_{name}")}

    assert needs("paired", "sigmoid") == {"reference"}
    assert needs("paired", "simpo,sft") == set()
    assert needs("paired", "simpo,sigmoid") == {"reference"}
    assert needs("paired", "aot") == needs("paired", "sft,aot_unpaired") == {"reference", "sorting"}
    assert needs("paired", "orpo", teacher="t") == {"teacher"}
    assert needs("unpaired", "kto") == {"reference", "reference_point"}
    assert needs("unpaired", "kto_no_reference_point") == {"reference"}
    assert needs("unpaired", "bco,sft") == {"reference", "shift"}
    assert needs("unpaired", "bco,kto") == {"reference", "shift", "reference_point"}
    assert needs("single", "sft") == set()
    assert needs("single", "sft", teacher="t") == {"teacher"}


def test_automatic_weights() -> None:
    """DESIGN, Weights: the larger class keeps 1; every loss of the method gets them."""
    labels = [True] * 6 + [False] * 2
    for loss in ("kto", "bco", "apo_zero_unpaired,kto"):
        method = method_of("unpaired", loss, labels, desirable_weight="auto", undesirable_weight="auto")
        assert {(term.options["desirable_weight"], term.options["undesirable_weight"]) for term in method.terms} == {
            (1.0, 3.0)}
    method = method_of("unpaired", "kto", labels, undesirable_weight="auto", desirable_weight=2.0)
    assert (method.terms[0].options["desirable_weight"], method.terms[0].options["undesirable_weight"]) == (2.0, 3.0)


# --- what is written down and said ------------------------------------------------------------------------------------


def filled(view: Any, loss: str, **given: Any) -> dict[str, Any]:
    options = {**dict.fromkeys(OPTIONS), **given}
    return effective(method_of(view, loss, **options), {"loss": loss, **options})


def test_effective_values() -> None:
    """H2: `config.yaml` names the value in use, where the losses agree on one."""
    assert filled("paired", "sigmoid") == {"beta": 0.1, "label_smoothing": 0.0}
    assert filled("paired", "sigmoid", beta=0.3) == {"label_smoothing": 0.0}
    assert filled("paired", "simpo") == {"beta": 2.0, "simpo_gamma": 0.5, "label_smoothing": 0.0}
    assert filled("paired", "exo_pair") == {"beta": 0.1, "label_smoothing": 1e-3}
    assert filled("paired", "cpo") == {"beta": 0.1, "label_smoothing": 0.0, "cpo_alpha": 1.0}
    assert filled("paired", "hinge", f_divergence="alpha") == {"beta": 0.1, "f_alpha": 0.5}
    assert filled("paired", "sigmoid,simpo") == {"label_smoothing": 0.0, "simpo_gamma": 0.5}
    assert filled("paired", "sigmoid,robust") == {"beta": 0.1}
    assert filled("unpaired", "bco") == {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    assert filled("unpaired", "kto", beta=0.2, desirable_weight="auto", undesirable_weight=2.0) == {}


@pytest.mark.parametrize(("view", "loss"), [*PREFERENCES, ("paired", "sigmoid,simpo,sft"), ("paired", "exo_pair,aot"),
                                            ("unpaired", "kto,bco,sft"), ("paired", "discopop,cpo,robust")])
def test_effective_values_make_the_same_method(view: Any, loss: str) -> None:
    """DESIGN 6: the written configuration is accepted, and repeats the run."""
    method = method_of(view, loss)
    assert method_of(view, loss, **filled(view, loss)) == method


@pytest.mark.parametrize(("options", "words"), [
    ({"loss": "ipo"}, ["ipo (", "summed", "beta 0.1"]),
    ({"loss": "ipo_mean"}, ["ipo_mean (", "per token"]),
    ({"loss": "sigmoid", "label_smoothing": 0.2}, ["DPO", "label_smoothing 0.2"]),
    ({"loss": "sigmoid", "f_divergence": "alpha"}, ["f_divergence alpha", "f_alpha 0.5"]),
    ({"loss": "sigmoid,sft", "loss_weights": "1,0.2"}, ["1 x sigmoid", "0.2 x sft", "per token"]),
    ({"loss": "simpo"}, ["no reference", "beta 2", "simpo_gamma 0.5"]),
    ({"loss": "sigmoid", "ld_alpha": 0.5}, ["LD-DPO", "0.5"]),
    ({"loss": "sigmoid", "wpo": True}, ["WPO"]),
])
def test_the_reading_in_use_is_named(options: dict[str, Any], words: list[str]) -> None:
    """L2: where a name has two readings, the log says which one this is."""
    check_options("paired", options)
    text = describe_method(build_method("paired", options, []))
    assert [word for word in words if word not in text] == []
    assert "f_divergence reverse_kl" not in text


@pytest.mark.parametrize(("options", "discounts"), [
    ({}, False), ({"ld_alpha": 1.0}, False), ({"ld_alpha": 0.5}, True), ({"ld_alpha": 0.0}, True)])
def test_a_length_that_decides_is_answered_only_if_it_counts_for_less(options: dict[str, Any],
                                                                     discounts: bool) -> None:
    """At 1 the tokens beyond the shorter side count in full, as without LD-DPO."""
    assert method_of("paired", "sigmoid", **options).discounts_length is discounts
    assert method_of("paired", "simpo").discounts_length
