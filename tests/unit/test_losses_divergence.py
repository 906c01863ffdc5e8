"""Divergences of next-token distributions: values, slopes, and the promises of `tropism.losses.divergence`."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import case_yaml, expected
from tropism.losses.divergence import DEFAULT_MIX, DIVERGENCES, forward_kl, js, reverse_kl, skew, tail_logp, tvd

MIX = 0.3
every_divergence = pytest.mark.parametrize("name", DIVERGENCES)


def naive(name: str, p: Tensor, q: Tensor, mix: float) -> Tensor:
    """The definitions, one position per row, with nothing done about rounding."""
    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    m = mix * p + (1 - mix) * q
    definitions: dict[str, Callable[[], Tensor]] = {
        "forward_kl": lambda: kl(p, q),
        "reverse_kl": lambda: kl(q, p),
        "js": lambda: mix * kl(p, m) + (1 - mix) * kl(q, m),
        "skew": lambda: kl(p, m),
        "tvd": lambda: 0.5 * (p - q).abs().sum(-1),
    }
    return definitions[name]()


def of_logits(log_q: Tensor, slope: Tensor) -> Tensor:
    """The gradient with respect to the student's logits, as the caller forms it."""
    return slope - log_q.exp() * slope.sum(-1, keepdim=True)


def random_logits(count: int = 6, vocabulary: int = 11, scale: float = 3.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(scale * torch.randn(count, vocabulary, generator=generator, dtype=torch.float64) for _ in range(2))


# --- values and slopes -----------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    """L2: p = (1/2, 1/2) against q = (1/4, 3/4): every value by its formula."""
    log_p, log_q = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.25, 0.75]]).double().log()
    assert forward_kl(log_p, log_q, mix=0.0)[0].item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert reverse_kl(log_p, log_q, mix=0.0)[0].item() == pytest.approx(
        0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert tvd(log_p, log_q, mix=0.0)[0].item() == pytest.approx(0.25)
    # m = (3/8, 5/8) for the even mixture.
    to_m = 0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5)
    assert skew(log_p, log_q, mix=0.5)[0].item() == pytest.approx(to_m)
    from_q = 0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)
    assert js(log_p, log_q, mix=0.5)[0].item() == pytest.approx(0.5 * to_m + 0.5 * from_q)


def test_default_mixes() -> None:
    """L2: the symmetric Jensen-Shannon divergence, and the skew of DistiLLM."""
    assert DEFAULT_MIX == {"js": 0.5, "skew": 0.1}


@every_divergence
@pytest.mark.parametrize("mix", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("scale", [0.3, 3.0, 12.0])
def test_against_autograd_of_the_definition(name: str, mix: float, scale: float) -> None:
    """L2: values, and gradients of the student's logits."""
    teacher, student = random_logits(scale=scale)
    student.requires_grad_()
    wanted = naive(name, teacher.softmax(-1), student.softmax(-1), mix)
    (gradient,) = torch.autograd.grad(wanted.sum(), student)
    log_p, log_q = teacher.log_softmax(-1), student.detach().log_softmax(-1)
    value, slope = DIVERGENCES[name](log_p, log_q, mix=mix)
    torch.testing.assert_close(value, wanted.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(of_logits(log_q, slope), gradient, rtol=1e-8, atol=1e-10)


@every_divergence
def test_float32_near_the_optimum(name: str) -> None:
    """N1: a student one part in a thousand away: value and gradient keep their digits in float32."""
    teacher, change = random_logits(vocabulary=1000)
    log_p = teacher.float().log_softmax(-1)
    log_q = (teacher + 1e-3 * change).float().log_softmax(-1)
    value, slope = DIVERGENCES[name](log_p, log_q, mix=MIX)
    exact, exact_slope = DIVERGENCES[name](log_p.double().log_softmax(-1), log_q.double().log_softmax(-1), mix=MIX)
    torch.testing.assert_close(value.double(), exact, rtol=2e-3, atol=0)
    gradient = of_logits(log_q.double(), exact_slope)
    error = (of_logits(log_q, slope).double() - gradient).norm() / gradient.norm()
    assert error < 2e-3


# --- promises --------------------------------------------------------------------------------------------------------


@every_divergence
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exactly_zero_where_equal(name: str, dtype: torch.dtype) -> None:
    """L2: a student that is its teacher costs 0, and moves nowhere: not 1e-9, and not -0.0 times something."""
    log_p = (40 * random_logits(vocabulary=500)[0]).to(dtype).log_softmax(-1)
    log_p[:, 7] = -torch.inf
    value, slope = DIVERGENCES[name](log_p, log_p.clone(), mix=MIX)
    assert (value == 0).all()
    assert (of_logits(log_p, slope) == 0).all()


@every_divergence
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-6, 1e-3, 0.1, 3.0, 50.0]),
       apart=st.sampled_from([0.0, 1e-7, 1e-5, 1e-3, 0.1, 1.0]))
def test_never_negative(name: str, seed: int, scale: float, apart: float) -> None:
    """L2: in float32, near and far, no value is below 0 by more than rounding; and none is NaN."""
    rng = np.random.default_rng(seed)
    teacher = scale * torch.from_numpy(rng.normal(size=(4, 64))).float()
    student = teacher + apart * torch.from_numpy(rng.normal(size=(4, 64))).float() * max(scale, 1.0)
    value, slope = DIVERGENCES[name](teacher.log_softmax(-1), student.log_softmax(-1), mix=MIX)
    assert (value >= -1e-7).all()
    assert slope.isfinite().all()


EXTREMES = torch.tensor([
    [0.0, -1e4, -1e4, -1e4],
    [-1e4, 0.0, -1e4, -1e4],
    [0.0, -torch.inf, -torch.inf, -torch.inf],
    [-torch.inf, -math.log(2), -math.log(2), -torch.inf],
    [-math.log(4)] * 4,
    [-100.0, -200.0, -1e-7, -87.0],
    [-80.0, -1e-7, -103.0, -90.0],
])


@every_divergence
@pytest.mark.parametrize("mix", [1e-3, 0.1, 0.5, 0.999])
def test_extremes(name: str, mix: float) -> None:
    """N1: probabilities of exactly 0 and differences of 1e4 nats, each against each, in float32: finite and >= 0."""
    log_p, log_q = EXTREMES.repeat_interleave(len(EXTREMES), 0), EXTREMES.repeat(len(EXTREMES), 1)
    value, slope = DIVERGENCES[name](log_p, log_q, mix=mix)
    assert value.isfinite().all()
    assert (value >= -1e-7).all()
    assert of_logits(log_q, slope).isfinite().all()
    bound = {"js": math.log(2), "skew": -math.log(mix), "tvd": 1.0}.get(name, torch.inf)
    assert (value <= bound + 1e-4).all()  # 1 - mix has lost digits of a small mix


def test_disjoint_supports() -> None:
    """L2: what theory says of distributions that share no token; a KL is infinite there and stays very large."""
    log_p, log_q = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]])
    assert js(log_p, log_q, mix=0.5)[0].item() == pytest.approx(math.log(2))
    assert skew(log_p, log_q, mix=0.1)[0].item() == pytest.approx(-math.log(0.1))
    assert tvd(log_p, log_q, mix=0.0)[0].item() == 1.0
    assert forward_kl(log_p, log_q, mix=0.0)[0].item() >= 1e4
    assert reverse_kl(log_p, log_q, mix=0.0)[0].item() >= 1e4


@given(seed=st.integers(0, 999))
def test_js_turns_round(seed: int) -> None:
    """L2: exchanging teacher and student is exchanging the weights of the mixture."""
    log_p, log_q = (logits.log_softmax(-1) for logits in random_logits(seed=seed))
    torch.testing.assert_close(js(log_p, log_q, mix=0.2)[0], js(log_q, log_p, mix=0.8)[0], rtol=1e-10, atol=1e-14)


def test_js_and_skew_have_the_divergences_as_limits() -> None:
    """L2: JS / mix goes to the forward KL, JS / (1 - mix) to the reverse KL, the skew KL to the forward KL."""
    log_p, log_q = (logits.log_softmax(-1) for logits in random_logits(scale=1.0))
    forward, reverse = forward_kl(log_p, log_q, mix=0.0)[0], reverse_kl(log_p, log_q, mix=0.0)[0]
    torch.testing.assert_close(js(log_p, log_q, mix=1e-6)[0] / 1e-6, forward, rtol=1e-4, atol=0)
    torch.testing.assert_close(js(log_p, log_q, mix=1 - 1e-6)[0] / 1e-6, reverse, rtol=1e-4, atol=0)
    torch.testing.assert_close(skew(log_p, log_q, mix=1e-6)[0], forward, rtol=1e-4, atol=0)


# --- the likeliest tokens and the tail -------------------------------------------------------------------------------


def test_tail_of_little_mass() -> None:
    """N1: a tail of 1e-9: one minus the kept mass is 0 in float32; the sum over the tail is not."""
    logits = torch.tensor([[0.0, -1.0, -21.0, -22.0, -23.0]])
    log_z = logits.logsumexp(-1)
    wanted = logits.double()[:, 2:].logsumexp(-1) - logits.double().logsumexp(-1)
    found = tail_logp(logits, torch.tensor([[1, 0]]), log_z)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
    assert 1 - (logits - log_z[:, None])[:, :2].exp().sum() < 1e-6


def with_tail() -> tuple[Tensor, Tensor]:
    """Case 23: the kept tokens of both and the rest as one more outcome."""
    case = case_yaml("23-kd-topk-tail.yaml")
    return tuple(torch.tensor([[*kept, 1 - sum(kept)]], dtype=torch.float64).log()
                 for kept in (case["teacher_p"], case["student_q"]))


def test_case_23() -> None:
    """L2: with the tail as one outcome; not the truncated sum, which is negative, nor the renormalized one."""
    log_p, log_q = with_tail()
    value, slope = forward_kl(log_p, log_q, mix=0.0)
    assert value.item() == pytest.approx(expected("23")["with_tail_bucket"], rel=0, abs=1e-6)
    terms = log_p.exp() * (log_p - log_q)
    assert terms[:, :-1].sum().item() == pytest.approx(expected("23")["truncated_sum"], rel=0, abs=1e-6)
    kept_p, kept_q = (log[:, :-1].log_softmax(-1) for log in (log_p, log_q))
    renormalized = forward_kl(kept_p, kept_q, mix=0.0)[0].item()
    assert renormalized == pytest.approx(expected("23")["renormalised"], rel=0, abs=1e-6)
    gradient = of_logits(log_q, slope)
    torch.testing.assert_close(gradient, log_q.exp() - log_p.exp())
    assert gradient[0, -1].item() == pytest.approx(-0.17)  # the tail is to grow


@every_divergence
def test_case_23_under_every_divergence(name: str) -> None:
    """L2: never below 0, and every one of them asks for a larger tail."""
    log_p, log_q = with_tail()
    value, slope = DIVERGENCES[name](log_p, log_q, mix=MIX)
    assert value.item() > 0
    assert of_logits(log_q, slope)[0, -1].item() < 0


@every_divergence
@given(seed=st.integers(0, 9999), k=st.integers(1, 9))
def test_merging_the_tail_loses_nothing_but_detail(name: str, seed: int, k: int) -> None:
    """L2: data processing: k tokens and a tail are never further apart than the whole distributions are."""
    teacher, student = random_logits(seed=seed)
    kept = teacher.topk(k, dim=-1).indices

    def merged(logits: Tensor) -> Tensor:
        log_z = logits.logsumexp(-1)
        return torch.cat((logits.gather(1, kept) - log_z[:, None], tail_logp(logits, kept, log_z)[:, None]), dim=-1)

    for log in (merged(teacher), merged(student)):
        torch.testing.assert_close(log.exp().sum(-1), torch.ones(len(log), dtype=torch.float64))
    whole = DIVERGENCES[name](teacher.log_softmax(-1), student.log_softmax(-1), mix=MIX)[0]
    part = DIVERGENCES[name](merged(teacher), merged(student), mix=MIX)[0]
    assert (part <= whole + 1e-12).all()
    assert (part >= -1e-12).all()
