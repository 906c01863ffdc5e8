"""A head whose vocabulary is divided over processes, played by threads in lockstep, against the undivided one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep import Meeting, Seat, together
from tropism.errors import ModelError
from tropism.losses.divergence import DIVERGENCES
from tropism.model.head.divergence import Comparison, FullTargets, TopK, top_k
from tropism.model.head.logprob import Head, head_of
from tropism.model.head.vocab_parallel import UNDIVIDED, Columns, Divided

S, D, CHUNK = 7, 5, 3
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5}
of_dtypes = st.sampled_from(list(BOUND))
of_sizes = {"vocabulary": st.integers(2, 23), "processes": st.integers(1, 5)}
of_heads = {"with_bias": st.booleans(), "scale": st.sampled_from([1.0, 0.3]), "softcap": st.sampled_from([None, 3.0])}


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def a_head(vocabulary: int, seed: int, dtype: torch.dtype, with_bias: bool, scale: float,
           softcap: float | None) -> Head:
    return Head(random(vocabulary, D, seed=seed, dtype=dtype),
                random(vocabulary, seed=seed + 1, dtype=dtype) if with_bias else None, scale, softcap)


def part(head: Head, group: Seat) -> Head:
    """The rows that one process has, as torch.chunk deals them."""
    columns = Divided.of(len(head.weight), group)
    dealt = torch.arange(len(head.weight)).chunk(group.size)
    rows = dealt[group.rank] if group.rank < len(dealt) else torch.empty(0, dtype=torch.int64)
    assert (columns.width, columns.start) == (len(rows), rows[0] if len(rows) else len(head.weight))
    return replace(head, weight=head.weight[rows], bias=None if head.bias is None else head.bias[rows],
                   columns=columns)


def differentiate(head: Head, hidden: Tensor, of: Callable[[Head, Tensor], tuple[Tensor, ...]],
                  learns: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """Values, and gradients by hidden states, weight and bias, of a head's own leaves."""
    head = replace(head, weight=head.weight.clone().requires_grad_(learns),
                   bias=None if head.bias is None else head.bias.clone().requires_grad_(learns))
    hidden = hidden.clone().requires_grad_()
    found = of(head, hidden)
    upstream = [random(len(one), seed=50 + number, dtype=one.dtype) for number, one in enumerate(found)]
    leaves = [leaf for leaf in (hidden, head.weight, head.bias) if leaf is not None and leaf.requires_grad]
    total = sum((one * weight).sum() for one, weight in zip(found, upstream, strict=True))
    return [one.detach() for one in found], list(torch.autograd.grad(total, leaves))


def check(whole: tuple[list[Tensor], list[Tensor]], parts: list[tuple[list[Tensor], list[Tensor]]],
          dtype: torch.dtype) -> None:
    """Equal to the undivided ones, and to the bit on all processes where they are the same thing."""
    for values, gradients in parts:
        assert all(map(torch.equal, (*values, gradients[0]), (*parts[0][0], parts[0][1][0])))
    joined = [*parts[0][0], parts[0][1][0],
              *(torch.cat(rows) for rows in list(zip(*(gradients for _, gradients in parts), strict=True))[1:])]
    for got, right in zip(joined, (*whole[0], *whole[1]), strict=True):
        assert got.dtype == right.dtype
        torch.testing.assert_close(got, right, rtol=BOUND[dtype], atol=BOUND[dtype])


# --- log-probs --------------------------------------------------------------------------------------------------------


@given(dtype=of_dtypes, learns=st.booleans(), seed=st.integers(0, 999), **of_sizes, **of_heads)
def test_log_probs(vocabulary: int, processes: int, dtype: torch.dtype, learns: bool, seed: int, **how: Any) -> None:
    """O1: values and gradients, a frozen head's included, with any division: uneven, and with processes without any."""
    hidden, head = random(S, D, seed=seed, dtype=dtype), a_head(vocabulary, seed + 1, dtype, **how)
    ids = torch.randint(vocabulary, (S,), generator=torch.Generator().manual_seed(seed))

    def of(one: Head, states: Tensor) -> tuple[Tensor, ...]:
        return (one.per_token_logps(states, ids, CHUNK),)

    parts, calls = together(processes, lambda group: differentiate(part(head, group), hidden, of, learns))
    check(differentiate(head, hidden, of, learns), parts, dtype)
    assert calls == 6  # three tiles of positions: their log Z, and their gradient


@given(dtype=of_dtypes, seed=st.integers(0, 999), **of_sizes, **of_heads)
def test_log_collisions(vocabulary: int, processes: int, dtype: torch.dtype, seed: int, **how: Any) -> None:
    """L3: how peaked each prediction is."""
    hidden, head = random(S, D, seed=seed, dtype=dtype), a_head(vocabulary, seed + 1, dtype, **how)
    parts, _ = together(processes, lambda group: part(head, group).log_collisions(hidden, CHUNK))
    assert all(torch.equal(one, parts[0]) for one in parts)
    torch.testing.assert_close(parts[0], head.log_collisions(hidden, CHUNK), rtol=BOUND[dtype], atol=BOUND[dtype])


def test_huge_logits_are_stable() -> None:
    """M4, N2: finite where one process has all of the mass, or where the target's probability is nothing."""
    hidden, head = random(S, D, seed=1, dtype=torch.float32), Head(1e4 * random(9, D, seed=2, dtype=torch.float32))
    ids = torch.arange(S)
    whole = head.per_token_logps(hidden, ids)
    parts, _ = together(3, lambda group: differentiate(
        part(head, group), hidden, lambda one, states: (one.per_token_logps(states, ids, CHUNK),)))
    torch.testing.assert_close(parts[0][0][0], whole, rtol=1e-6, atol=1e-6)
    assert all(gradient.isfinite().all() for gradient in parts[0][1])


def test_bfloat16_products() -> None:
    """N2: what crosses processes is at least float32; the gradient has the dtype of the hidden states."""
    hidden, head = random(S, D, seed=1).bfloat16(), replace(Head(random(9, D, seed=2).float()), compute=torch.bfloat16)
    crossed = set()

    class Watched(Seat):
        def sum(self, values: Tensor) -> Tensor:
            crossed.add(values.dtype)
            return super().sum(values)

    def task(group: Seat) -> tuple[list[Tensor], list[Tensor]]:
        return differentiate(part(head, Watched(group.meeting, group.rank)), hidden,
                             lambda one, states: (one.per_token_logps(states, torch.arange(S), CHUNK),))

    parts, _ = together(2, task)
    assert crossed == {torch.float32}
    assert parts[0][1][0].dtype == torch.bfloat16
    assert parts[0][0][0].dtype == torch.float32


# --- divergence -------------------------------------------------------------------------------------------------------


@pytest.mark.some(4)
@pytest.mark.parametrize("kind", ["exact", "top-k", "exact, whole teacher"])
@pytest.mark.parametrize("name", DIVERGENCES)
@settings(max_examples=25)
@given(dtype=of_dtypes, padding=st.integers(0, 9), k=st.integers(1, 22), temperature=st.sampled_from([1.0, 2.0]),
       seed=st.integers(0, 999), **of_sizes, **of_heads)
def test_divergences(name: str, kind: str, vocabulary: int, processes: int, dtype: torch.dtype, padding: int, k: int,
                     temperature: float, seed: int, **how: Any) -> None:
    """O1, L2, V1, L4: student and teacher divided, some last columns padding, stored tokens of a divided teacher."""
    hidden, states_of_teacher = (random(S, D, seed=seed + n, dtype=dtype) for n in (0, 1))
    student, teacher = (a_head(vocabulary + padding, seed + n, dtype, **how) for n in (2, 4))
    ids = torch.randint(vocabulary, (S,), generator=torch.Generator().manual_seed(seed))
    compare = Comparison(partial(DIVERGENCES[name], mix=0.3), temperature, temperature**2, vocabulary)

    def of(of_teacher: Head, one: Head, states: Tensor) -> tuple[Tensor, ...]:
        targets = (FullTargets(states_of_teacher, of_teacher) if kind != "top-k" else
                   top_k(states_of_teacher, of_teacher, min(k, vocabulary - 1), temperature, vocabulary))
        return compare.per_token(states, one, ids, targets, CHUNK)

    def task(group: Seat) -> tuple[list[Tensor], list[Tensor]]:
        of_teacher = teacher if kind == "exact, whole teacher" else part(teacher, group)
        return differentiate(part(student, group), hidden, partial(of, of_teacher))

    parts, calls = together(processes, task)
    check(differentiate(student, hidden, partial(of, teacher)), parts, dtype)
    # Three tiles of positions: log Z and target, what the comparison needs, and the gradient; top_k sends three times.
    assert calls == {"exact": 3 * (1 + 2 + 1), "top-k": 3 * (1 + 1 + 1) + 3}[kind.partition(",")[0]]


@pytest.mark.parametrize("name", DIVERGENCES)
def test_columns_meet_in_the_value_alone(name: str) -> None:
    """L2: the value is a sum over columns, and no column's slope depends on the others; no column at all counts 0."""
    log_p, log_q = (3 * random(S, 9, seed=seed) for seed in (1, 2))
    log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
    value, slope = DIVERGENCES[name](log_p, log_q, mix=0.3)
    parts = [DIVERGENCES[name](log_p[:, cut], log_q[:, cut], mix=0.3)
             for cut in (slice(0, 4), slice(4, 4), slice(4, 9))]
    torch.testing.assert_close(sum(part[0] for part in parts), value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([part[1] for part in parts], dim=-1), slope, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("kind", ["exact", "top-k"])
def test_exactly_zero_where_equal(name: str, kind: str) -> None:
    """L2: also on five processes, whose sums depend on the order in which they are taken.

    Equal logits are the premise, so student and teacher have chunks of equal size: a matrix product rounds a row
    differently beside other numbers of rows (on Intel CPUs with AVX-512, for one).
    """
    hidden, head = random(S, D, seed=1, dtype=torch.float32), a_head(23, 2, torch.float32, True, 0.7, 3.0)
    compare = Comparison(partial(DIVERGENCES[name], mix=0.3), 2.0, 4.0, 19)

    def of(one: Head, states: Tensor) -> tuple[Tensor, ...]:
        targets = FullTargets(hidden, one) if kind == "exact" else top_k(hidden, one, 3, 2.0, 19, CHUNK)
        return (compare.per_token(states, one, torch.zeros(S, dtype=torch.int64), targets, CHUNK)[1],)

    parts, _ = together(5, lambda group: differentiate(part(head, group), hidden, of))
    for (value,), gradients in parts:
        assert (value == 0).all()
        assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("chunk", [1, 2, 5, S])
def test_rounding_alone_where_stored_in_other_chunks(name: str, chunk: int) -> None:
    """L4: stored values come from other packs, whose products may round differently: never below 0, nor above that."""
    hidden, head = random(S, D, seed=1, dtype=torch.float32), a_head(23, 2, torch.float32, True, 0.7, 3.0)
    compare = Comparison(partial(DIVERGENCES[name], mix=0.3), 2.0, 4.0, 19)
    ids = torch.zeros(S, dtype=torch.int64)
    parts, _ = together(5, lambda group: compare.per_token(
        hidden, part(head, group), ids, top_k(hidden, part(head, group), 3, 2.0, 19, chunk), CHUNK)[1])
    assert all(torch.equal(value, parts[0]) for value in parts)
    assert (parts[0] >= 0).all()
    assert (parts[0] < (1e-6 if name == "tvd" else 1e-11)).all()  # of the order of the rounding, or of its square


def test_masked_columns() -> None:
    """M4: a process all of whose columns the student never says."""
    def of(one: Head, states: Tensor) -> tuple[Tensor, ...]:
        return compare.per_token(states, one, torch.zeros(S, dtype=torch.int64), targets[one.columns == UNDIVIDED])

    hidden, head = random(S, D, seed=1), a_head(9, 2, torch.float64, True, 1.0, None)
    assert head.bias is not None
    head.bias[3:6] = -1e30
    compare = Comparison(partial(DIVERGENCES["js"], mix=0.3), 1.0, 1.0, 9)
    whole = top_k(random(S, D, seed=6), a_head(9, 7, torch.float64, False, 1.0, None), 2, 1.0, 9)
    targets: dict[bool, TopK] = {True: whole, False: whole}
    parts, _ = together(3, lambda group: differentiate(part(head, group), hidden, of))
    check(differentiate(head, hidden, of), parts, torch.float64)


# --- likeliest tokens -------------------------------------------------------------------------------------------------


@given(k=st.integers(1, 22), seed=st.integers(0, 999), values=st.integers(1, 9), **of_sizes)
def test_top_k_with_ties(vocabulary: int, processes: int, k: int, seed: int, values: int) -> None:
    """L4: of equal logits, any: the kept ones are distinct, none left out is larger, and all processes agree."""
    k = min(k, vocabulary - 1)
    table = torch.randint(values, (S, vocabulary), generator=torch.Generator().manual_seed(seed)).double()
    table[0] = -torch.inf
    table[0, 0] = 0
    head = Head(table.nan_to_num(neginf=-1e308).t().contiguous())
    eye = torch.eye(S).double()
    parts, _ = together(processes, lambda group: top_k(eye, part(head, group), k, 1.0, vocabulary))
    right = top_k(eye, head, k, 1.0, vocabulary)
    for found in parts:
        assert torch.equal(found.ids, parts[0].ids)
        assert all(len(set(row)) == k and set(row) <= set(range(vocabulary)) for row in found.ids.tolist())
        torch.testing.assert_close(found.logps, right.logps, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found.tail, right.tail, rtol=1e-12, atol=1e-12)


# --- what is refused, and what costs nothing --------------------------------------------------------------------------


@pytest.mark.parametrize(("teacher", "shared", "works"), [(8, 6, True), (9, 4, True), (11, 8, False), (9, 8, False)])
def test_heads_divided_at_other_ids_are_refused(teacher: int, shared: int, works: bool) -> None:
    """V1: two heads of unequal size are cut at other ids, unless beyond what both share; all processes say so."""
    hidden, student = random(S, D, seed=1), Head(random(8, D, seed=2))
    other = Head(random(teacher, D, seed=3))
    compare = Comparison(partial(DIVERGENCES["js"], mix=0.3), 1.0, 1.0, shared)

    def task(group: Seat) -> Tensor | str:
        try:
            return compare.per_token(hidden, part(student, group), torch.zeros(S, dtype=torch.int64),
                                     FullTargets(hidden, part(other, group)))[1]
        except ModelError as error:
            return str(error)

    found, _ = together(2, task)
    if works:
        right = compare.per_token(hidden, student, torch.zeros(S, dtype=torch.int64), FullTargets(hidden, other))[1]
        torch.testing.assert_close(found[0], right, rtol=1e-12, atol=1e-12)
    else:
        assert all("--top-k" in one for one in found)


def test_a_divided_teacher_beside_a_whole_student_is_refused() -> None:
    hidden, head = random(S, D, seed=1), Head(random(8, D, seed=2))
    with pytest.raises(ModelError, match="only one is divided"):
        together(2, lambda group: FullTargets(hidden, part(head, group)).compare(
            slice(0, 2), random(2, 8, seed=3), 1.0, partial(DIVERGENCES["js"], mix=0.3), UNDIVIDED))


def test_a_model_whose_rows_are_not_those_is_refused() -> None:
    """What a model has here has to be what its columns say."""
    model = SimpleNamespace(get_output_embeddings=lambda: SimpleNamespace(weight=torch.zeros(9, 2)),
                            config=SimpleNamespace(get_text_config=SimpleNamespace))
    columns: Columns = Divided.of(9, Seat(Meeting(2), 1))
    with pytest.raises(ModelError, match=r"9 rows on process 1\b.*\b4 of 9\b"):
        head_of(model, columns=columns)
    assert len(head_of(model).weight) == 9


def test_chunks_are_equal_on_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """X1: by the max_width share, also where there are fewer columns or none: as many meetings everywhere."""
    monkeypatch.setattr("tropism.model.head.tiles.CPU_TILE", 8)
    hidden, head = random(S, D, seed=1), Head(random(9, D, seed=2))
    for processes, chunks in ((2, 7), (5, 2), (6, 2)):  # shares of 5, 2 and 2, the last one with none
        _, calls = together(processes, lambda group: part(head, group).per_token_logps(hidden, torch.arange(S)))
        assert calls == chunks
