"""Every loss of pairs as a function of the two sides and beta alone, for tests that hold for all of them."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tropism.losses import Scored, pairwise, reference_free
from tropism.losses import aot as transport
from tropism.losses import f_divergence_links as links

PairLoss = Callable[..., Tensor]


def aot_alone(chosen: Scored, rejected: Scored, **options: float) -> Tensor:
    """`aot` where the given pairs are the whole step."""
    partner = transport.partners(chosen.logps - rejected.logps, chosen.reference_logps - rejected.reference_logps)
    return transport.aot(chosen, rejected, partner=partner, **options)


def aot_unpaired_alone(chosen: Scored, rejected: Scored, **options: float) -> Tensor:
    """`aot_unpaired` where the given pairs are the whole step."""
    return transport.aot_unpaired(
        chosen, rejected, chosen_partner=transport.partners(chosen.logratios, rejected.logratios),
        rejected_partner=transport.partners(rejected.logratios, chosen.logratios), **options)


# Functions of the difference of two linked log-ratios; each is tried with every link.
_OF_LINKS: dict[str, PairLoss] = {
    "sigmoid": partial(pairwise.sigmoid, label_smoothing=0.0),
    "cdpo": partial(pairwise.sigmoid, label_smoothing=0.1),
    "robust": partial(pairwise.robust, label_smoothing=0.1),
    "hinge": pairwise.hinge,
    "ipo": pairwise.ipo,
    "ipo_mean": pairwise.ipo_mean,
    "sigmoid_norm": pairwise.sigmoid_norm,
    "exo_pair": partial(pairwise.exo_pair, label_smoothing=0.1),
    "discopop": partial(pairwise.discopop, discopop_tau=0.05),
}
LINKS = {"forward_kl": links.forward_kl, "js": links.js, "alpha 0.5": links.alpha(0.5), "alpha 2": links.alpha(2.0)}

LINKED = _OF_LINKS | {f"{loss} {link}": partial(function, link=of)
                      for loss, function in _OF_LINKS.items() for link, of in LINKS.items()}
OF_REFERENCE = LINKED | {
    "nca_pair": pairwise.nca_pair,
    "bco_pair": pairwise.bco_pair,
    "sppo_hard": pairwise.sppo_hard,
    "apo_zero": pairwise.apo_zero,
    "apo_down": pairwise.apo_down,
}
OF_POLICY: dict[str, PairLoss] = {
    "cpo": partial(reference_free.cpo, label_smoothing=0.1),
    "simpo": partial(reference_free.simpo, simpo_gamma=0.5, label_smoothing=0.1),
    "odds_ratio": reference_free.odds_ratio,
}
OF_STEP: dict[str, PairLoss] = {
    "aot": partial(aot_alone, label_smoothing=0.1),
    "aot_unpaired": partial(aot_unpaired_alone, label_smoothing=0.1),
}
PAIRED = OF_REFERENCE | OF_POLICY | OF_STEP


def scored(logps: Tensor | Sequence[float], reference_logps: Tensor | Sequence[float],
           lengths: Tensor | Sequence[int]) -> Scored:
    """Completions from numbers, in float64 unless they are tensors already; the policy's log-probs take a gradient."""
    policy, reference = (values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
                         for values in (logps, reference_logps))
    return Scored(policy.detach().clone().requires_grad_(), reference, torch.as_tensor(lengths))


def gradients(losses: Tensor, *sides: Scored) -> tuple[Tensor, ...]:
    """Of the sum of the losses, with respect to each side's log-probs."""
    return torch.autograd.grad(losses.sum(), [side.logps for side in sides], materialize_grads=True)
