"""Divergences between a teacher's and a student's next-token distribution, with their gradients.

Autograd would keep several `[n, V]` tensors of a divergence over a vocabulary. Each function here returns its value and
its slope instead, from which the caller computes the gradient with respect to the student's logits:

    slope = q * d value / d q,        d value / d logits = slope - q * slope.sum(-1)

The second formula removes any multiple of q from a slope. Slopes are chosen up to such a multiple so that they are
exactly 0 where p and q agree to the bit, and so is the value. A value is never negative beyond rounding, because it is
a sum of non-negative terms: `(q - p) + p (log p - log q)` is `p (exp(u) - 1 - u)` with u = log q - log p, and the added
terms `q - p` sum to 0. Values are not clamped, so that distributions that do not sum to 1 remain visible.
"""

from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

LogProbs = Float[Tensor, "n V"]
PerRow = Float[Tensor, " n"]

# Log-probs are clamped to this from below, so that no difference of two is a NaN. A divergence that is infinite in
# theory is then finite and of this order.
LOWEST = -1e5


class Divergence(Protocol):
    """Divergence of the student from the teacher at each of n positions."""

    def __call__(self, log_p: LogProbs, log_q: LogProbs, *, mix: float, value: bool = True) -> tuple[PerRow, LogProbs]:
        """Value and slope.

        Columns interact only in the sum over them. If columns are divided over processes, each process can compute its
        own: the values add up to the total, and each slope is that of its columns.

        Args:
            log_p: `[n, V]` log-probs of the teacher; each row sums to 1 in probability.
            log_q: `[n, V]` log-probs of the student; the same.
            mix: weight of the teacher in the mixture, 0 < mix < 1; ignored by divergences without one.
            value: if false, compute the slope alone.

        Returns:
            `[n]` divergence in nats (0 if not requested), and `[n, V]` slope.
        """
        ...


def forward_kl(log_p: LogProbs, log_q: LogProbs, *, mix: float,
               value: bool = True) -> tuple[PerRow, LogProbs]:
    """KL(p || q) (Hinton, Vinyals and Dean 2015, arXiv:1503.02531, minus the teacher's entropy).

    `sum p log(p / q)`: the student must give probability to all that the teacher does. Its slope is q - p.
    """
    p, q, u = _parts(log_p, log_q)
    return _kl(p, q, u) if value else _nothing(u), q - p


def reverse_kl(log_p: LogProbs, log_q: LogProbs, *, mix: float,
               value: bool = True) -> tuple[PerRow, LogProbs]:
    """KL(q || p) (Gu et al. 2024, MiniLLM, arXiv:2306.08543, for one position).

    `sum q log(q / p)`: the student must avoid what the teacher gives no probability.
    """
    p, q, u = _parts(log_p, log_q)
    return _kl(q, p, -u) if value else _nothing(u), q * u


def js(log_p: LogProbs, log_q: LogProbs, *, mix: float,
       value: bool = True) -> tuple[PerRow, LogProbs]:
    """Generalized Jensen-Shannon divergence (Agarwal et al. 2024, GKD, arXiv:2306.13649, equation 1).

    With m = mix p + (1 - mix) q, `mix KL(p || m) + (1 - mix) KL(q || m)`. Bounded by log 2. Divided by mix it
    approaches the forward KL as mix approaches 0; divided by 1 - mix, the reverse KL as mix approaches 1.
    """
    p, q, u = _parts(log_p, log_q)
    m, above_p, above_q = _mixture(p, q, u, mix)
    found = mix * _kl(p, m, above_p) + (1 - mix) * _kl(q, m, above_q) if value else _nothing(u)
    return found, -(1 - mix) * q * above_q


def skew(log_p: LogProbs, log_q: LogProbs, *, mix: float,
         value: bool = True) -> tuple[PerRow, LogProbs]:
    """Skew KL divergence (Ko et al. 2024, DistiLLM, arXiv:2402.03898).

    `KL(p || mix p + (1 - mix) q)`: the forward KL, with a gradient that stays bounded where q goes to 0.
    """
    p, q, u = _parts(log_p, log_q)
    m, above_p, _ = _mixture(p, q, u, mix)
    return _kl(p, m, above_p) if value else _nothing(u), -(1 - mix) * q * torch.expm1(-above_p)


def tvd(log_p: LogProbs, log_q: LogProbs, *, mix: float,
        value: bool = True) -> tuple[PerRow, LogProbs]:
    """Total variation distance (Wen et al. 2023, arXiv:2307.15190, for one position): `0.5 sum |p - q|`, at most 1."""
    p, q, u = _parts(log_p, log_q)
    return 0.5 * (q - p).abs().sum(-1) if value else _nothing(u), 0.5 * q * u.sign()


DIVERGENCES: dict[str, Divergence] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "js": js,
    "skew": skew,
    "tvd": tvd,
}

# Default mixtures: the symmetric one, and the value of the paper's experiments.
DEFAULT_MIX: dict[str, float] = {"js": 0.5, "skew": 0.1}


def tail_logp(logits: LogProbs, kept: Int[Tensor, "n k"], log_z: PerRow) -> PerRow:
    """Log-prob of all tokens that are not kept, together.

    It is a sum over those tokens, since 1 minus the kept mass would lose all digits if that mass is near 1.

    Args:
        logits: `[n, V]` logits or log-probs, one distribution per row.
        kept: `[n, k]` ids of the kept tokens, distinct within a row, k < V.
        log_z: `[n]` log of the normalizer, `logits.logsumexp(-1)`.

    Returns:
        `[n]` log-prob of the tail, in nats.
    """
    return logits.scatter(-1, kept, -torch.inf).logsumexp(-1) - log_z


def _parts(log_p: LogProbs, log_q: LogProbs) -> tuple[LogProbs, LogProbs, LogProbs]:
    """p, q and u = log q - log p, which is finite and exactly 0 where the two agree."""
    log_p, log_q = log_p.clamp(min=LOWEST), log_q.clamp(min=LOWEST)
    return log_p.exp(), log_q.exp(), log_q - log_p


def _nothing(u: LogProbs) -> PerRow:
    """In place of a value that was not requested."""
    return u.new_zeros(len(u))


def _kl(p: LogProbs, q: LogProbs, u: LogProbs) -> PerRow:
    """KL(p || q) with u = log q - log p, as a sum of terms >= 0."""
    # Near u = 0 the plain form loses digits by cancellation; far from it, exp(u) of the other form may overflow.
    terms = torch.where(u.abs() < 1, p * (torch.expm1(u) - u), (q - p) - p * u)
    return terms.sum(-1)


def _mixture(p: LogProbs, q: LogProbs, u: LogProbs, mix: float) -> tuple[LogProbs, LogProbs, LogProbs]:
    """m = mix p + (1 - mix) q, log m - log p and log m - log q, all from u = log q - log p."""
    # With the larger of p and q factored out, the rest is log1p of a value in (-1, 0].
    smaller = torch.expm1(-u.abs())
    below = torch.log1p(torch.where(u > 0, mix * smaller, (1 - mix) * smaller))
    return mix * p + (1 - mix) * q, u.clamp(min=0) + below, (-u).clamp(min=0) + below
