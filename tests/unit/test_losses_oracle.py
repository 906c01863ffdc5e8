"""Every loss that TRL has, against TRL's own numbers for 200 random pairs: values and gradients.

`tools/make_oracle.py` wrote them. TRL's step is its batch, and its mean is over pairs.
"""

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import CASES
from loss_calls import aot_alone, aot_unpaired_alone
from tropism.losses import Scored, divergence, pairwise, reference_free, unpaired
from tropism.losses import f_divergence_links as links
from tropism.losses.sft import nll

(ORACLE,) = (CASES / "oracle").glob("trl-*.npz")
with np.load(ORACLE) as stored:
    DATA: dict[str, Any] = {name: stored[name] for name in stored.files}
ABOUT = json.loads(str(DATA["about"]))
SETTINGS = ABOUT["settings"]
UNPAIRED = ("kto", "apo_zero_unpaired")


def sides(ld_alpha: float = 1.0) -> list[Scored]:
    """Chosen and rejected; `ld_alpha` weighs the tokens beyond the shorter side's length."""
    def summed(kind: str) -> Tensor:
        return torch.from_numpy(DATA[f"input/{kind}shared"] + ld_alpha * DATA[f"input/{kind}tail"])

    lengths = torch.from_numpy(DATA["input/lengths"])
    parts = zip(summed("").chunk(2), summed("reference_").chunk(2), lengths.chunk(2), strict=True)
    return [Scored(policy.clone().requires_grad_(), reference, length) for policy, reference, length in parts]


def of_name(name: str) -> Any:
    """The function that a case's name stands for, with the settings of the case."""
    settings = SETTINGS[name]
    loss, options = name.split()[0], {"beta": settings["beta"]}
    if loss in ("sigmoid", "robust", "exo_pair", "cpo", "simpo", "aot", "aot_unpaired"):
        options["label_smoothing"] = settings.get("label_smoothing", 0.0)
    if "f_divergence_type" in settings:
        link = settings["f_divergence_type"].removesuffix("_divergence")
        options["link"] = links.link_of(link, settings.get("f_alpha_divergence_coef", 0.0))
    if loss == "discopop":
        options["discopop_tau"] = 0.05
    if loss == "simpo":
        options["simpo_gamma"] = settings["simpo_gamma"]
    # TRL's `ipo` is on means per token.
    named = {"ipo": pairwise.ipo_mean, "aot": aot_alone, "aot_unpaired": aot_unpaired_alone}
    home = reference_free if hasattr(reference_free, loss) and loss not in named else pairwise
    return partial(named.get(loss) or getattr(home, loss), **options)


def agree(name: str, loss: Tensor, *at: Scored) -> None:
    """The mean loss and its gradients are the stored ones, to 1e-6 of their size."""
    torch.testing.assert_close(loss.detach(), torch.from_numpy(DATA[f"{name}/loss"]), rtol=1e-6, atol=1e-9)
    found = torch.autograd.grad(loss, [side.logps for side in at], materialize_grads=True)
    for gradient, side in zip(found, ("chosen", "rejected"), strict=True):
        torch.testing.assert_close(gradient, torch.from_numpy(DATA[f"{name}/{side}"]), rtol=1e-6, atol=1e-9)


PLAIN = [name for name in SETTINGS if not name.startswith("divergence/")
         and name not in ("sft", "sigmoid ld", "sigmoid wpo", "sigmoid and sft", *UNPAIRED)]


@pytest.mark.parametrize("name", PLAIN)
def test_pairs(name: str) -> None:
    """L2: each loss of pairs, with its links and label smoothing."""
    at = sides()
    agree(name, of_name(name)(*at).mean(), *at)


def test_the_oracle_is_complete() -> None:
    """L2: no loss of TRL 1.16 is left out."""
    assert ABOUT["trl"] == "1.16.0"
    assert {name.split()[0] for name in SETTINGS} == {
        "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
        "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft", "cpo", "simpo", "odds_ratio", *UNPAIRED,
        "divergence/forward_kl", "divergence/reverse_kl", "divergence/js"}


def test_sft_is_a_mean_over_tokens() -> None:
    """L2: sums of completions, divided by the tokens of the step."""
    at = sides()
    agree("sft", nll(at[0]).sum() / at[0].lengths.sum(), *at)


def test_several_losses() -> None:
    """L2: a weighted sum, each loss with its own denominator."""
    at = sides()
    preference = pairwise.sigmoid(*at, beta=0.1, label_smoothing=0.0).mean()
    agree("sigmoid and sft", preference + 0.2 * nll(at[0]).sum() / at[0].lengths.sum(), *at)


def test_length_desensitised() -> None:
    """L2: LD-DPO: tokens beyond the shorter side's length weigh 0.5, in policy and reference."""
    at = sides(ld_alpha=SETTINGS["sigmoid ld"]["ld_alpha"])
    agree("sigmoid ld", pairwise.sigmoid(*at, beta=0.1, label_smoothing=0.0).mean(), *at)


def test_weighted_preference_optimization() -> None:
    """L2: WPO: the pair's loss times exp of both sides' mean confidence."""
    at = sides()
    confidence = torch.from_numpy(DATA["input/confidence"]).chunk(2)
    weights = torch.exp(confidence[0] + confidence[1])
    agree("sigmoid wpo", (weights * pairwise.sigmoid(*at, beta=0.1, label_smoothing=0.0)).mean(), *at)


@pytest.mark.parametrize("name", UNPAIRED)
def test_unpaired(name: str) -> None:
    """L2: chosen sides as desirable, rejected ones as undesirable completions, of unequal weight."""
    at = sides()
    units = Scored(*(torch.cat([getattr(side, field) for side in at])
                     for field in ("logps", "reference_logps", "lengths")))
    desirable = torch.arange(len(units.logps)) < len(units.logps) // 2
    options = {key: SETTINGS[name][key] for key in ("beta", "desirable_weight", "undesirable_weight")}
    point = [torch.tensor(SETTINGS[name]["reference_point"], dtype=torch.float64)] if name == "kto" else []
    agree(name, getattr(unpaired, name)(units, desirable, *point, **options).mean(), *at)


@pytest.mark.parametrize("name", [name for name in SETTINGS if name.startswith("divergence/")])
def test_divergence(name: str) -> None:
    """L2: values summed over positions, and gradients of the student's logits."""
    log_p, log_q = (torch.from_numpy(DATA[f"input/{model}_logits"]).log_softmax(-1) for model in ("teacher", "student"))
    function = divergence.DIVERGENCES[name.removeprefix("divergence/").split()[0]]
    value, slope = function(log_p, log_q, mix=SETTINGS[name]["mix"])
    torch.testing.assert_close(value.sum(), torch.from_numpy(DATA[f"{name}/loss"]), rtol=1e-9, atol=0)
    gradient = slope - log_q.exp() * slope.sum(-1, keepdim=True)
    torch.testing.assert_close(gradient, torch.from_numpy(DATA[f"{name}/logits"]), rtol=1e-9, atol=1e-12)
