"""The chunked divergence from a teacher against plain autograd over all logits; top-k targets; padding; case 23."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers import case_yaml, expected
from logits_traffic import Largest
from tropism.losses.divergence import DIVERGENCES
from tropism.model.head import divergence as of_models
from tropism.model.head.divergence import Comparison, FullTargets, Targets, TopK, top_k
from tropism.model.head.logprob import Head

S, D, VOCABULARY = 19, 8, 29
STUDENT_COLUMNS, TEACHER_COLUMNS = VOCABULARY + 3, VOCABULARY + 6
MIX, K = 0.3, 5
every_divergence = pytest.mark.parametrize("name", DIVERGENCES)
both_kinds = pytest.mark.parametrize("kind", ["exact", "top-k"])


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Problem:
    """A student and a teacher whose heads differ in columns, scale, cap and width, and the tokens to compare on."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        make = partial(random, dtype=dtype)
        self.hidden = make(S, D, seed=1).requires_grad_()
        self.weight = make(STUDENT_COLUMNS, D, seed=2).requires_grad_()
        self.bias = make(STUDENT_COLUMNS, seed=3).requires_grad_()
        self.head = Head(self.weight, self.bias, 0.7, 3.0)
        self.teacher_hidden = make(S, D + 1, seed=4)
        self.teacher_head = Head(make(TEACHER_COLUMNS, D + 1, seed=5), make(TEACHER_COLUMNS, seed=6), 1.3, 5.0)
        self.ids = torch.randint(VOCABULARY, (S,), generator=torch.Generator().manual_seed(7))

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias

    def targets(self, kind: str, temperature: float, k: int = K) -> Targets:
        if kind == "exact":
            return FullTargets(self.teacher_hidden, self.teacher_head)
        return top_k(self.teacher_hidden, self.teacher_head, k, temperature, VOCABULARY)


def comparison(name: str, temperature: float = 1.0, scale: float | None = None,
               vocabulary: int = VOCABULARY) -> Comparison:
    scale = temperature**2 if scale is None else scale
    return Comparison(partial(DIVERGENCES[name], mix=MIX), temperature, scale, vocabulary)


def all_logits(hidden: Tensor, head: Head) -> Tensor:
    """By the definition, all positions at once, under autograd."""
    logits = (hidden @ head.weight.t() + (0 if head.bias is None else head.bias)) * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def naive(name: str, p: Tensor, q: Tensor) -> Tensor:
    """`[n]` divergence by its definition."""
    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    m = MIX * p + (1 - MIX) * q
    definitions: dict[str, Callable[[], Tensor]] = {
        "forward_kl": lambda: kl(p, q), "reverse_kl": lambda: kl(q, p), "skew": lambda: kl(p, m),
        "js": lambda: MIX * kl(p, m) + (1 - MIX) * kl(q, m), "tvd": lambda: 0.5 * (p - q).abs().sum(-1)}
    return definitions[name]()


def merged(probabilities: Tensor, kept: Tensor) -> Tensor:
    """Kept tokens, and the sum of the others."""
    rest = probabilities.scatter(1, kept, 0.0).sum(-1, keepdim=True)
    return torch.cat((probabilities.gather(1, kept), rest), dim=-1)


def plain(problem: Problem, name: str, kind: str, temperature: float, scale: float) -> tuple[Tensor, Tensor]:
    """What `per_token` must give."""
    logits = all_logits(problem.hidden, problem.head)
    logps = logits.log_softmax(-1).gather(1, problem.ids[:, None]).squeeze(1)
    q = (logits[:, :VOCABULARY] / temperature).softmax(-1)
    p = (all_logits(problem.teacher_hidden, problem.teacher_head)[:, :VOCABULARY] / temperature).softmax(-1)
    if kind == "top-k":
        kept = p.topk(K, dim=-1).indices
        p, q = merged(p, kept), merged(q, kept)
    return logps, scale * naive(name, p, q)


# --- values and gradients -------------------------------------------------------------------------------------------


@every_divergence
@both_kinds
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("temperature", "scale"), [(1.0, 1.0), (2.0, 4.0), (2.0, 1.0)])
def test_against_plain_autograd(name: str, kind: str, dtype: torch.dtype, bound: float, temperature: float,
                                scale: float) -> None:
    """O1, L2, V1: both outputs and their gradients, for any chunk, with bias, scale, cap and padded columns."""
    problem = Problem(dtype)
    logps, away = plain(problem, name, kind, temperature, scale)
    of_logps, of_divergence = random(S, seed=8, dtype=dtype), random(S, seed=9, dtype=dtype).abs()
    wanted = torch.autograd.grad((of_logps * logps + of_divergence * away).sum(), problem.leaves)
    for chunk in (1, 8, S, None):
        found = comparison(name, temperature, scale).per_token(
            problem.hidden, problem.head, problem.ids, problem.targets(kind, temperature), chunk)
        for got, right in zip(found, (logps, away), strict=True):
            torch.testing.assert_close(got, right, rtol=bound, atol=bound)
        gradients = torch.autograd.grad((of_logps * found[0] + of_divergence * found[1]).sum(), problem.leaves)
        for got, right in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(got, right, rtol=bound, atol=bound)


@both_kinds
def test_a_frozen_head(kind: str) -> None:
    """L3: the hidden states alone, or the head alone, may learn; a head without bias, scale or cap as well."""
    problem = Problem()
    how, targets = comparison("js", 2.0), problem.targets(kind, 2.0)

    def total(hidden: Tensor, head: Head) -> Tensor:
        return torch.stack(how.per_token(hidden, head, problem.ids, targets, 4)).sum()

    hidden, weight = torch.autograd.grad(total(problem.hidden, problem.head), (problem.hidden, problem.weight))
    frozen = replace(problem.head, weight=problem.weight.detach(), bias=problem.bias.detach())
    torch.testing.assert_close(torch.autograd.grad(total(problem.hidden, frozen), problem.hidden)[0], hidden)
    alone = total(problem.hidden.detach(), problem.head)
    torch.testing.assert_close(torch.autograd.grad(alone, problem.weight)[0], weight)
    problem.head = bare = Head(problem.weight)
    logps, away = plain(problem, "js", kind, 2.0, 4.0)
    wanted = torch.autograd.grad((logps + away).sum(), (problem.hidden, problem.weight))
    for got, one in zip(torch.autograd.grad(total(problem.hidden, bare), (problem.hidden, problem.weight)), wanted,
                        strict=True):
        torch.testing.assert_close(got, one, rtol=1e-10, atol=1e-10)


@both_kinds
def test_no_gradient_reaches_the_teacher(kind: str) -> None:
    """L2: what the teacher says is a constant, even where its tensors would take a gradient."""
    problem = Problem()
    learns = [problem.teacher_hidden.requires_grad_(), problem.teacher_head.weight.requires_grad_()]
    targets = problem.targets(kind, 1.0)
    if isinstance(targets, TopK):
        assert not targets.logps.requires_grad
        targets.logps.requires_grad_()
        learns.append(targets.logps)
    comparison("forward_kl").per_token(problem.hidden, problem.head, problem.ids, targets)[1].sum().backward()
    assert all(tensor.grad is None for tensor in learns)
    assert problem.hidden.grad is not None
    assert problem.hidden.grad.abs().sum() > 0


@both_kinds
def test_no_token_at_all(kind: str) -> None:
    """X1: a rank whose share is empty takes part with gradients of zeros."""
    problem = Problem()
    problem.teacher_hidden = problem.teacher_hidden[:0]
    found = comparison("forward_kl").per_token(problem.hidden[:0], problem.head, problem.ids[:0],
                                               problem.targets(kind, 1.0))
    assert [len(part) for part in found] == [0, 0]
    for leaf, gradient in zip(problem.leaves, torch.autograd.grad(torch.cat(found).sum(), problem.leaves),
                              strict=True):
        assert gradient.shape == leaf.shape
        assert (gradient == 0).all()


# --- promises -------------------------------------------------------------------------------------------------------


@every_divergence
@both_kinds
@pytest.mark.parametrize("compute", [torch.float64, torch.float32, torch.bfloat16])
def test_exactly_zero_where_equal(name: str, kind: str, compute: torch.dtype) -> None:
    """L2: a student that is its teacher costs exactly 0 and moves nowhere, to the bit, in every precision."""
    problem = Problem(torch.promote_types(compute, torch.float32))
    problem.teacher_hidden = problem.hidden.detach()
    problem.head = problem.teacher_head = replace(problem.head, compute=compute)
    _, away = comparison(name, 2.0).per_token(problem.hidden, problem.head, problem.ids, problem.targets(kind, 2.0))
    assert (away == 0).all()
    for gradient in torch.autograd.grad(away.sum(), problem.leaves):
        assert (gradient == 0).all()


@given(seed=st.integers(0, 9999), k=st.integers(1, VOCABULARY - 1), temperature=st.sampled_from([0.5, 1.0, 4.0]))
def test_top_k_lies_between_zero_and_the_whole(seed: int, k: int, temperature: float) -> None:
    """L4: k tokens and a tail are never below 0 and never further apart than the whole distributions."""
    teacher, student = random(4, VOCABULARY, seed=seed), random(4, VOCABULARY, seed=seed + 10_000)
    how, eye, ids = comparison("forward_kl", temperature), Head(torch.eye(VOCABULARY).double()), torch.zeros(4).long()
    _, whole = how.per_token(student, eye, ids, FullTargets(teacher, eye))
    _, part = how.per_token(student, eye, ids, top_k(teacher, eye, k, temperature, VOCABULARY))
    assert (part >= 0).all()
    assert (part <= whole + 1e-12).all()
    if k == VOCABULARY - 1:
        torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-12)


@every_divergence
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_all_tokens_but_one_are_the_whole(name: str, temperature: float) -> None:
    """L4: with k = V - 1 the tail is a single token: value and gradient are those of the whole distribution."""
    problem = Problem()
    how = comparison(name, temperature)
    found = []
    for targets in (problem.targets("exact", temperature), problem.targets("top-k", temperature, VOCABULARY - 1)):
        _, away = how.per_token(problem.hidden, problem.head, problem.ids, targets)
        found.append((away, *torch.autograd.grad(away.sum(), problem.leaves)))
    for whole, part in zip(*found, strict=True):
        torch.testing.assert_close(part, whole, rtol=1e-10, atol=1e-10)


@every_divergence
@both_kinds
@given(seed=st.integers(0, 9999), k=st.integers(1, VOCABULARY - 1), size=st.sampled_from([0.1, 3.0, 30.0]),
       apart=st.sampled_from([1e-7, 1e-4, 0.1, 10.0]))
def test_never_negative_in_float32(name: str, kind: str, seed: int, k: int, size: float, apart: float) -> None:
    """L4, N1: at most 1e-7 of rounding below 0, near and far, and a finite gradient."""
    logits = size * random(3, VOCABULARY, seed=seed, dtype=torch.float32)
    student = (logits + apart * random(3, VOCABULARY, seed=seed + 1, dtype=torch.float32)).requires_grad_()
    eye = Head(torch.eye(VOCABULARY))
    targets = FullTargets(logits, eye) if kind == "exact" else top_k(logits, eye, k, 1.0, VOCABULARY)
    _, away = comparison(name).per_token(student, eye, torch.zeros(3, dtype=torch.int64), targets)
    assert (away >= -1e-7).all()
    assert torch.autograd.grad(away.sum(), student)[0].isfinite().all()


class AsGiven(Head):
    """Hidden states that are the logits themselves: a product with zeros would make NaN of infinities."""

    def raw(self, hidden: Tensor, weight: Tensor, columns: slice = slice(None)) -> Tensor:
        return hidden[:, columns].clone()


@every_divergence
@both_kinds
@pytest.mark.parametrize("masked", [-torch.inf, -1e4])
@pytest.mark.parametrize("tokens", [3, VOCABULARY - K])
def test_masked_tokens(name: str, kind: str, masked: float, tokens: int) -> None:
    """M4: tokens that the student never says, up to all that the teacher's top k leave out: finite throughout."""
    teacher, student = random(2, VOCABULARY, seed=0), random(2, VOCABULARY, seed=1)
    order = teacher.argsort(dim=-1)
    student.scatter_(1, order[:, :tokens], masked)
    teacher.scatter_(1, order[:, : tokens // 2], masked)
    student.requires_grad_()
    head = AsGiven(torch.eye(VOCABULARY).double())
    targets = FullTargets(teacher, head) if kind == "exact" else top_k(teacher, head, K, 1.0, VOCABULARY)
    _, away = comparison(name).per_token(student, head, torch.tensor([4, 5]), targets)
    gradient, = torch.autograd.grad(away.sum(), student)
    assert away.isfinite().all()
    assert (away >= 0).all()
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


def test_bfloat16_compute() -> None:
    """N2: products in bfloat16, divergence and gradients in float32, near those of float32."""
    problem = Problem(torch.float32)
    exact = comparison("forward_kl", 2.0).per_token(problem.hidden, problem.head, problem.ids,
                                                    problem.targets("exact", 2.0))
    wanted = torch.autograd.grad(torch.stack(exact).sum(), problem.leaves)
    problem.head = replace(problem.head, compute=torch.bfloat16)
    problem.teacher_head = replace(problem.teacher_head, compute=torch.bfloat16)
    for kind in ("exact", "top-k"):
        found = comparison("forward_kl", 2.0).per_token(problem.hidden, problem.head, problem.ids,
                                                        problem.targets(kind, 2.0, VOCABULARY - 1), 8)
        for got, right in zip(found, exact, strict=True):
            assert got.dtype == torch.float32
            assert (got - right).norm() < 0.02 * right.norm()
        for got, right in zip(torch.autograd.grad(torch.stack(found).sum(), problem.leaves), wanted, strict=True):
            assert got.dtype == torch.float32
            assert (got - right).norm() < 0.02 * right.norm()


# --- padded columns -------------------------------------------------------------------------------------------------


@both_kinds
def test_padded_columns_are_left_out(kind: str) -> None:
    """V1: whatever stands in the columns beyond the vocabulary, the rest is renormalized and they get no gradient."""
    problem = Problem()
    found = []
    for padding in (-20.0, 0.0, 3.0):
        with torch.no_grad():
            problem.bias[VOCABULARY:] = padding
            problem.teacher_head.bias[VOCABULARY:] = padding + 1
        logps, away = comparison("forward_kl").per_token(problem.hidden, problem.head, problem.ids,
                                                         problem.targets(kind, 1.0), 8)
        _, weight, bias = torch.autograd.grad(away.sum(), problem.leaves)
        assert (weight[VOCABULARY:] == 0).all()
        assert (bias[VOCABULARY:] == 0).all()
        found.append((logps.detach(), away.detach()))
    torch.testing.assert_close(found[0][1], found[2][1], rtol=1e-12, atol=1e-12)
    assert (found[2][0] < found[0][0] - 0.1).all()  # the student's own log-probs are over all of its columns


@pytest.mark.parametrize(("student", "teacher"), [(0, 7), (7, 0), (7, 7)])
def test_padding_on_either_side_is_no_padding(student: int, teacher: int) -> None:
    """V1: appending columns to either head leaves the divergence and its gradient as they were."""
    def with_columns(head: Head, count: int) -> Head:
        return replace(head, weight=torch.cat((head.weight[:VOCABULARY], random(count, head.weight.shape[1], seed=3))),
                       bias=torch.cat((head.bias[:VOCABULARY], 2 + random(count, seed=4))))

    problem, found = Problem(), []
    for columns in ((0, 0), (student, teacher)):
        heads = [with_columns(head, count) for head, count in zip((problem.head, problem.teacher_head), columns,
                                                                  strict=True)]
        _, away = comparison("reverse_kl").per_token(problem.hidden, heads[0], problem.ids,
                                                     FullTargets(problem.teacher_hidden, heads[1]))
        found.append((away, torch.autograd.grad(away.sum(), problem.hidden)[0]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


# --- a teacher's likeliest tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 4, VOCABULARY - 1])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_top_k_against_sorting(monkeypatch: pytest.MonkeyPatch, k: int, temperature: float) -> None:
    """L4: ids by falling probability under softmax(logits / T); the tail is the logsumexp of what is left out."""
    monkeypatch.setattr(of_models, "_CPU_CHUNK", 4 * TEACHER_COLUMNS)  # S is no multiple of 4
    problem = Problem()
    found = top_k(problem.teacher_hidden, problem.teacher_head, k, temperature, VOCABULARY)
    assert found.ids.shape == found.logps.shape == (S, k)
    logits = all_logits(problem.teacher_hidden, problem.teacher_head)[:, :VOCABULARY] / temperature
    for position in range(S):
        order = sorted(range(VOCABULARY), key=lambda token: -logits[position, token].item())
        logps = logits[position].log_softmax(-1)
        assert found.ids[position].tolist() == order[:k]
        torch.testing.assert_close(found.logps[position], logps[order[:k]], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.tail[position], logps[order[k:]].logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_a_tail_of_little_mass_keeps_its_digits() -> None:
    """L4, N2: a tail of 1e-9 in float32, where one minus the kept mass is nothing."""
    logits = torch.tensor([[0.0, -1.0, -21.0, -22.0, -23.0]])
    found = top_k(logits, Head(torch.eye(5)), 2, 1.0, 5)
    wanted = logits.double().log_softmax(-1)[:, 2:].logsumexp(-1)
    torch.testing.assert_close(found.tail.double(), wanted, rtol=1e-6, atol=0)


def test_case_23() -> None:
    """L4: with the tail as one outcome, and a gradient that makes the student's tail grow."""
    case, want = case_yaml("23-kd-topk-tail.yaml"), expected("23")
    kept, p, q = (torch.tensor(case[name], dtype=dtype) for name, dtype in (
        ("kept_ids", torch.int64), ("teacher_p", torch.float64), ("student_q", torch.float64)))
    others = [token for token in range(12) if token not in kept.tolist()]
    shares = torch.arange(1, len(others) + 1).double()
    whole = torch.zeros(1, 12, dtype=torch.float64)
    whole[0, kept], whole[0, others] = q, (1 - q.sum()) * shares / shares.sum()
    student = whole.log().requires_grad_()
    targets = TopK(kept[None], p.log()[None], (1 - p.sum()).log()[None])
    _, away = comparison("forward_kl", vocabulary=12).per_token(
        student, Head(torch.eye(12).double()), torch.tensor([7]), targets)
    assert away.item() == pytest.approx(want["with_tail_bucket"], rel=0, abs=1e-6)
    for other in (want["truncated_sum"], want["renormalised"]):
        assert abs(away.item() - other) > 0.2
    gradient, = torch.autograd.grad(away.sum(), student)
    torch.testing.assert_close(gradient[0, kept], q - p)
    # The tail as a whole is to grow from 0.03 to 0.2, each of its tokens by its share.
    torch.testing.assert_close(gradient[0, others], whole[0, others] * (1 - 0.2 / 0.03))
    assert (gradient[0, others] < 0).all()


# --- memory ---------------------------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("positions", [256, 2048])
def test_logits_exist_for_one_chunk_only(monkeypatch: pytest.MonkeyPatch, kind: str, positions: int) -> None:
    """O1: the largest logits of student and teacher do not grow with the number of positions."""
    monkeypatch.setattr(of_models, "_CPU_CHUNK", 64 * VOCABULARY)
    head = Head(torch.randn(VOCABULARY, D, requires_grad=True))
    hidden, teacher = torch.randn(positions, D, requires_grad=True), torch.randn(positions, D)
    targets = FullTargets(teacher, head) if kind == "exact" else top_k(teacher, head, K, 1.0, VOCABULARY)
    with Largest() as largest:
        found = comparison("js").per_token(hidden, head, torch.zeros(positions, dtype=torch.int64), targets)
        torch.stack(found).sum().backward()
    assert largest.elements == max(64 * VOCABULARY, positions * D)
