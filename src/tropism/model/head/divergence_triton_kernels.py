"""The divergence of two tiles of logits in Triton: each is read three times forwards, and once backwards.

Stands for what `FullTargets` does in plain torch, which is the truth. Sums are taken in float32, with the largest logit
of a row taken out; log-sum-exps are kept in float64 as a sum of both. Imported only if it is used.
"""

from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

_BLOCK = 4096
KINDS = {"forward_kl": 0, "reverse_kl": 1, "js": 2, "skew": 3, "tvd": 4}
_LOWEST = tl.constexpr(-1e5)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _expm1(x):  # noqa: ANN001, ANN202
    """exp(x) - 1, without cancellation near 0."""
    series = x * (1.0 + x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x / 5040))))))
    return tl.where(tl.abs(x) < 0.3, series, tl.exp(x) - 1.0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _log1p(x):  # noqa: ANN001, ANN202
    """log(1 + x) for -1 < x <= 0 (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 1.14.1)."""
    whole = 1.0 + x
    return tl.where(whole == 1.0, x, tl.log(whole) * x / tl.where(whole == 1.0, 1.0, whole - 1.0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _kl(p, q, u):  # noqa: ANN001, ANN202
    near = tl.abs(u) < 1.0
    inner = tl.where(near, u, 0.0)
    small = inner * inner * (0.5 + inner * (1.0 / 6 + inner * (1.0 / 24 + inner * (
        1.0 / 120 + inner * (1.0 / 720 + inner * (1.0 / 5040 + inner / 40320))))))
    return tl.where(near, p * tl.where(tl.abs(inner) < 0.3, small, _expm1(inner) - inner), (q - p) - p * u)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _log_probs(logits, at, inside, scale, peak, rest):  # noqa: ANN001, ANN202
    """Log-probs of a block, clamped from below."""
    raw = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.maximum((raw * scale - peak) - rest, _LOWEST)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _parts(log_p, log_q, mix, KIND: tl.constexpr):  # noqa: ANN001, ANN202
    """Terms of the value, and the slope."""
    p, q, u = tl.exp(log_p), tl.exp(log_q), log_q - log_p
    smaller = _expm1(-tl.abs(u))
    below = _log1p(tl.where(u > 0, mix * smaller, (1.0 - mix) * smaller))
    m, above_p, above_q = mix * p + (1.0 - mix) * q, tl.maximum(u, 0.0) + below, tl.maximum(-u, 0.0) + below
    if KIND == 0:
        return _kl(p, q, u), q - p
    elif KIND == 1:
        return _kl(q, p, -u), q * u
    elif KIND == 2:
        return mix * _kl(p, m, above_p) + (1.0 - mix) * _kl(q, m, above_q), -(1.0 - mix) * q * above_q
    elif KIND == 3:
        return _kl(p, m, above_p), -(1.0 - mix) * q * _expm1(-above_p)
    else:
        return 0.5 * tl.abs(q - p), 0.5 * q * tl.where(u > 0, 1.0, tl.where(u < 0, -1.0, 0.0))


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _log_sum(logits, columns, scale, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
    """The largest scaled logit of a row, and the log-sum-exp above it."""
    peak, total = -3.4e38, 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        raw = tl.load(logits + at, mask=at < columns, other=-float("inf")).to(tl.float32) * scale
        higher = tl.maximum(peak, tl.max(raw, axis=0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(raw - higher), axis=0)
        peak = higher
    return peak, tl.log(total)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _compare(student, teacher, out, columns, student_stride, teacher_stride, scale, mix,  # noqa: ANN001, ANN202
             KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    student += row * student_stride
    teacher += row * teacher_stride
    peak_q, rest_q = _log_sum(student, columns, scale, BLOCK)
    peak_p, rest_p = _log_sum(teacher, columns, scale, BLOCK)
    value, total = 0.0, 0.0
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < columns
        terms, slope = _parts(_log_probs(teacher, at, inside, scale, peak_p, rest_p),
                              _log_probs(student, at, inside, scale, peak_q, rest_q), mix, KIND)
        value += tl.sum(tl.where(inside, terms, 0.0), axis=0)
        total += tl.sum(tl.where(inside, slope, 0.0), axis=0)
    out += row * 6
    tl.store(out, value)
    tl.store(out + 1, total)
    tl.store(out + 2, peak_q)
    tl.store(out + 3, rest_q)
    tl.store(out + 4, peak_p)
    tl.store(out + 5, rest_p)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _slope(student, teacher, numbers, out, columns, student_stride, teacher_stride, scale, mix,  # noqa: ANN001, ANN202
           KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    numbers += row * 6
    log_q = _log_probs(student + row * student_stride, at, inside, scale, tl.load(numbers + 2), tl.load(numbers + 3))
    log_p = _log_probs(teacher + row * teacher_stride, at, inside, scale, tl.load(numbers + 4), tl.load(numbers + 5))
    _, slope = _parts(log_p, log_q, mix, KIND)
    tl.store(out + row * columns + at, slope - tl.exp(log_q) * tl.load(numbers + 1), mask=inside)


def compare(student: Tensor, teacher: Tensor, temperature: float, kind: str, mix: float) -> tuple[Tensor, Tensor]:
    """`[n]` divergence, and the `[n, 6]` numbers that `slope` needs.

    Args:
        student, teacher: `[n, V]` logits; rows are contiguous.
        temperature: of both.
        kind: a key of `KINDS`.
        mix: weight of the teacher in the mixture.
    """
    out = torch.empty(len(student), 6, dtype=torch.float32, device=student.device)
    if len(student):
        _compare[(len(student),)](student, teacher, out, columns=student.shape[1], **_given(
            student, teacher, temperature, kind, mix))
    return out[:, 0].clone(), out


def slope(student: Tensor, teacher: Tensor, numbers: Tensor, temperature: float, kind: str, mix: float) -> Tensor:
    """`[n, c]` derivative of the divergence by the student's logits of a tile, times the temperature.

    Args:
        student, teacher, temperature, kind, mix: as in `compare`, for the columns of the tile.
        numbers: of `compare`.
    """
    out = torch.empty(student.shape, dtype=torch.float32, device=student.device)
    if out.numel():
        _slope[(len(student), triton.cdiv(student.shape[1], _BLOCK))](
            student, teacher, numbers.contiguous(), out, columns=student.shape[1], **_given(
                student, teacher, temperature, kind, mix))
    return out


def _given(student: Tensor, teacher: Tensor, temperature: float, kind: str, mix: float) -> dict[str, Any]:
    return {"student_stride": student.stride(0), "teacher_stride": teacher.stride(0), "scale": 1.0 / temperature,
            "mix": float(mix), "KIND": KINDS[kind], "BLOCK": _BLOCK}
