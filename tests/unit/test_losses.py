"""Losses against the numbers and formulas of the published implementations."""

import math

import jaxtyping
import pytest
import torch
from torch import Tensor

from helpers import case_yaml, expected
from tropism.data.batching.pack import partners
from tropism.losses import Scored
from tropism.losses.pairwise import sigmoid
from tropism.losses.unpaired import kto
from tropism.train.reference_point import pool, reference_moments

BETA, DESIRABLE_WEIGHT, UNDESIRABLE_WEIGHT = 0.1, 1.0, 1.33
LABELS = [True, False, True, True, False, False]

# Log-ratios of prompt i with completion j; the reference log-prob is -(20 + 3 i + 2 j).
LOGRATIOS = [
    [2.0, 1.5, -0.5, 3.0, 0.5, -1.0],
    [1.0, -3.0, 0.5, 2.0, 1.5, 0.5],
    [1.0, 0.8, 4.0, 3.0, -2.0, 2.5],
    [0.4, -1.6, 2.2, -1.5, -1.0, 2.7],
    [1.8, 0.6, -0.8, 2.4, 5.0, 1.0],
    [-2.0, 3.5, 1.4, -4.5, 0.9, -0.5],
]
REVERSED = [5, 4, 3, 2, 1, 0]  # another system's pairing: row i with the mirrored row


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def fixture(rows: list[int]) -> tuple[Scored, Tensor]:
    """Rows of the fixture with their own completions, ready for a gradient; and their labels."""
    reference = doubles(*(-(20 + 3 * i + 2 * i) for i in rows))
    policy = (reference + doubles(*(LOGRATIOS[i][i] for i in rows))).requires_grad_()
    return Scored(policy, reference, torch.ones(len(rows), dtype=torch.int64)), torch.tensor([LABELS[i] for i in rows])


def mismatched(rows: list[int], partner_of: list[int]) -> Tensor:
    """k of each row: the log-ratio of its prompt with its partner's completion, from the two log-probs."""
    reference = doubles(*(-(20 + 3 * i + 2 * rows[j]) for i, j in zip(rows, partner_of, strict=True)))
    policy = reference + doubles(*(LOGRATIOS[i][rows[j]] for i, j in zip(rows, partner_of, strict=True)))
    return policy - reference


def pooled(k: Tensor) -> Tensor:
    return pool(reference_moments(k, torch.ones_like(k))).value


def kto_of(rows: list[int], k: Tensor) -> tuple[Tensor, Tensor]:
    """Row losses, and the gradient of their mean with respect to the policy's log-probs."""
    scored, labels = fixture(rows)
    losses = kto(scored, labels, pooled(k), beta=BETA, desirable_weight=DESIRABLE_WEIGHT,
                 undesirable_weight=UNDESIRABLE_WEIGHT)
    (gradient,) = torch.autograd.grad(losses.mean(), scored.logps)
    return losses.detach(), gradient


def close(actual: Tensor, wanted: list[float] | float, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(actual, torch.tensor(wanted, dtype=torch.float64), rtol=0, atol=tolerance)


# --- KTO -------------------------------------------------------------------------------------------------------------


def test_kto_case_a() -> None:
    """L2: case A, and B's shift vector: values, row values and gradient of the published loss."""
    k = doubles(1.5, 0.5, 3.0, -1.0, 1.0, -2.0)
    close(pooled(k), 0.5, 1e-12)
    losses, gradient = kto_of(list(range(6)), k)
    close(losses.mean(), 0.569918842)
    close(losses, [0.462570155, 0.549798620, 0.413382421, 0.549833997, 0.812150181, 0.631777681])
    close(gradient, [-0.004143317, 0.005375359, -0.004041623, -0.004125276, 0.005270324, 0.005527836], 1e-9)


def test_kto_case_a_prime() -> None:
    """L2: case A', the reversed vector given to the loss."""
    k = mismatched(list(range(6)), REVERSED)
    close(k, [-1.0, 1.5, 3.0, 2.2, 0.6, -2.0], 1e-12)
    losses, gradient = kto_of(list(range(6)), k)
    close(losses.mean(), 0.569083323)
    close(losses, [0.467960627, 0.542824016, 0.418646204, 0.555190863, 0.805282566, 0.624595662])
    close(gradient, [-0.004149558, 0.005354612, -0.004056359, -0.004115899, 0.005295060, 0.005521209], 1e-9)


def test_kto_case_b_our_pairing_is_the_shift() -> None:
    """L2, K1: case B, a step of six distinct prompts paired by `partners`: the shift vector, not the reversed one."""
    k = mismatched(list(range(6)), partners(list("abcdef")))
    close(k, [1.5, 0.5, 3.0, -1.0, 1.0, -2.0], 1e-12)
    close(kto_of(list(range(6)), k)[0].mean(), 0.569918842)


@pytest.mark.parametrize(("rows", "point", "loss"), [
    pytest.param([0, 2, 3], 0.966667, 0.486762780, id="F only desirable"),
    pytest.param([1, 4, 5], 2.0, 0.616147630, id="G only undesirable"),
    pytest.param([3, 4, 5], 0.0, 0.671226406, id="H negative mean is clamped"),
])
def test_kto_other_batches(rows: list[int], point: float, loss: float) -> None:
    """L2, K4: one-class batches train normally; a negative mean is clamped at 0."""
    k = mismatched(rows, partners(rows))
    close(pooled(k), point)
    close(kto_of(rows, k)[0].mean(), loss)


def test_kto_case_i_without_weights() -> None:
    """L2: case I; reference and policy of mismatched completions enter through the pooled point only.

    The vanilla class pools the two classes' own log-ratios: undesirable mean for desirable rows and the reverse.
    """
    scored, labels = fixture(list(range(6)))
    ratios = scored.logratios.detach()
    chosen_point, rejected_point = ratios[labels].mean().clamp(min=0), ratios[~labels].mean().clamp(min=0)
    close(chosen_point, 1.5)
    close(rejected_point, 0.5)
    options = {"beta": BETA, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    against_rejected = kto(scored, labels, rejected_point, **options)[labels]
    against_chosen = kto(scored, labels, chosen_point, **options)[~labels]
    close(torch.cat((against_rejected, against_chosen)).mean().detach(), 0.475321820)


def test_two_ranks_pool_before_the_clamp() -> None:
    """K2: case E: local means 1 and -1.5 of opposite sign. Pooled moments are clamped once, weighted by rows.

    Partners within each rank's three rows give the pooled mean -0.25, so z0 = 0 and 0.571858169; clamping each rank
    first would give 0.5. The shift over the whole step, split over two ranks, gives 0.5.
    """
    halves = [mismatched(rows, partners(rows)) for rows in ([0, 1, 2], [3, 4, 5])]
    close(halves[0].mean(), 1.0, 1e-12)
    close(halves[1].mean(), -1.5, 1e-12)
    point = pool(sum(reference_moments(k, torch.ones_like(k)) for k in halves))
    close(point.raw, -0.25, 1e-12)
    assert point.value == 0
    close(kto_of(list(range(6)), torch.cat(halves))[0].mean(), 0.571858169)

    shift = mismatched(list(range(6)), partners(list(range(6))))
    point = pool(sum(reference_moments(k, torch.ones_like(k)) for k in (shift[:4], shift[4:])))
    close(point.value, 0.5, 1e-12)


def test_pooling_weighs_by_units_and_tells_its_error() -> None:
    """K2: a completion that is the partner of three units counts three times; its error is over distinct pairs."""
    k, counts = doubles(1.0, -3.0, 2.0), doubles(3, 1, 2)
    point = pool(reference_moments(k, counts))
    close(point.raw, (3 * 1.0 - 3.0 + 2 * 2.0) / 6, 1e-12)
    close(point.stderr, float(k.std(unbiased=True)) / math.sqrt(3), 1e-12)
    assert pool(reference_moments(k[:1], counts[:1])).stderr.isnan()


def test_stderr_of_float32_logratios_is_not_canceled() -> None:
    """K2: large log-ratios that differ little: a float32 difference of squares would lose their spread."""
    k = torch.tensor([50.0, 50.001, 50.002, 49.999], dtype=torch.float32)
    wanted = float(k.double().std(unbiased=True)) / 2
    point = pool(reference_moments(k, torch.ones(4, dtype=torch.float64)))
    assert float(point.stderr) == pytest.approx(wanted, rel=1e-6)


def test_no_gradient_into_the_reference_point() -> None:
    """K2: the point is a constant of the step even where it was computed with a graph."""
    scored, labels = fixture(list(range(6)))
    point = doubles(0.5)[0].requires_grad_()
    kto(scored, labels, point, beta=BETA, desirable_weight=1.0, undesirable_weight=1.0).sum().backward()
    assert point.grad is None
    assert scored.logps.grad is not None


def test_kto_gradient_formula() -> None:
    """L2: d loss / d logp = -lambda_D beta s (1 - s) / n, or + lambda_U beta s (1 - s) / n."""
    scored, labels = fixture(list(range(6)))
    losses, gradient = kto_of(list(range(6)), doubles(1.5, 0.5, 3.0, -1.0, 1.0, -2.0))
    s = torch.sigmoid(BETA * (scored.logratios.detach() - 0.5))
    slope = BETA * s * (1 - s) / 6
    torch.testing.assert_close(gradient, torch.where(labels, -slope * DESIRABLE_WEIGHT, slope * UNDESIRABLE_WEIGHT),
                               rtol=0, atol=1e-9)
    torch.testing.assert_close(losses[labels], 1 - s[labels], rtol=0, atol=1e-12)


def test_kto_weights_keep_float64() -> None:
    """K5: a weight that float32 cannot hold is not rounded in a float64 run."""
    zeros = torch.zeros(2, dtype=torch.float64)
    losses = kto(Scored(zeros, zeros, torch.ones(2, dtype=torch.int64)), torch.tensor([True, False]), zeros.sum(),
                 beta=BETA, desirable_weight=1.1, undesirable_weight=1.33)
    assert losses.tolist() == [0.55, 0.665]


def test_kto_saturates_without_overflow() -> None:
    """N1: extreme log-ratios give the bounds of the utility, with finite gradients."""
    logps = torch.tensor([-1e5, 1e5, -1e5, 1e5], requires_grad=True)
    scored = Scored(logps, torch.zeros(4), torch.ones(4, dtype=torch.int64))
    losses = kto(scored, torch.tensor([True, True, False, False]), torch.tensor(0.0), beta=BETA,
                 desirable_weight=1.0, undesirable_weight=2.0)
    losses.sum().backward()
    assert losses.tolist() == [1.0, 0.0, 0.0, 2.0]
    assert logps.grad is not None
    assert logps.grad.isfinite().all()


# --- DPO -------------------------------------------------------------------------------------------------------------


def one_pair() -> tuple[Scored, Scored]:
    inputs = case_yaml("21-pref-loss-table.yaml")["inputs"]
    return tuple(Scored(doubles(inputs[f"policy_{side}"]).requires_grad_(), doubles(inputs[f"ref_{side}"]),
                        torch.tensor([inputs[f"len_{side}"]])) for side in ("chosen", "rejected"))


@pytest.mark.parametrize(("smoothing", "key"), [(0.0, "sigmoid"), (0.1, "sigmoid_label_smoothing_0.1")])
def test_sigmoid_table(smoothing: float, key: str) -> None:
    """L2: the published pairwise table."""
    loss = sigmoid(*one_pair(), beta=0.1, label_smoothing=smoothing)
    close(loss.detach(), [expected("21")[key]])


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.3])
def test_sigmoid_gradient(smoothing: float) -> None:
    """L2: d loss / d h = -(1 - e) beta s(-beta h) + e beta s(beta h), equal and opposite for the two sides."""
    chosen, rejected = one_pair()
    loss = sigmoid(chosen, rejected, beta=0.1, label_smoothing=smoothing)
    up, down = torch.autograd.grad(loss.mean(), (chosen.logps, rejected.logps))
    h = 0.1 * 2.0
    right = 1 / (1 + math.exp(-h))
    slope = -(1 - smoothing) * 0.1 * (1 - right) + smoothing * 0.1 * right
    close(up, [slope], 1e-9)
    close(down, [-slope], 1e-9)


def test_sigmoid_is_finite_far_out() -> None:
    """N1: -log sigmoid is linear in a hopeless margin, not infinite, and 0 in a safe one."""
    policy = torch.tensor([-1e6, 1e6], requires_grad=True)
    zeros, ones = torch.zeros(2), torch.ones(2, dtype=torch.int64)
    loss = sigmoid(Scored(policy, zeros, ones), Scored(zeros, zeros, ones), beta=0.1, label_smoothing=0.0)
    loss.sum().backward()
    assert loss.tolist() == [pytest.approx(1e5), 0.0]
    assert policy.grad is not None
    assert policy.grad.tolist() == [pytest.approx(-0.1), 0.0]


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_wrong_shapes_are_errors_not_broadcasts() -> None:
    """The signatures are checked at run time: a column of labels or a vector of points would broadcast silently."""
    scored, labels = fixture(list(range(6)))
    options = {"beta": BETA, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    with pytest.raises(jaxtyping.TypeCheckError):
        kto(scored, labels[:, None], doubles(0.5)[0], **options)
    with pytest.raises(jaxtyping.TypeCheckError):
        kto(scored, labels, doubles(0.5), **options)
    with pytest.raises(jaxtyping.TypeCheckError):
        kto(scored, labels.double(), doubles(0.5)[0], **options)
    with pytest.raises(jaxtyping.TypeCheckError):
        Scored(scored.logps, scored.reference_logps[:3], scored.lengths)
    with pytest.raises(jaxtyping.TypeCheckError):
        sigmoid(scored, scored, beta=0.1, label_smoothing="none")
