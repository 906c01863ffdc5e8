"""The chunked head against plain log-softmax: values, gradients, memory."""

import pytest
import torch

from logits_traffic import Largest
from tropism.model.head.logprob import Head, head_of

S, D, V = 37, 16, 101


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(S, D, dtype=dtype, generator=generator, requires_grad=True)
    weight = torch.randn(V, D, dtype=dtype, generator=generator, requires_grad=True)
    bias = torch.randn(V, dtype=dtype, generator=generator, requires_grad=True)
    return hidden, weight, bias, torch.randint(V, (S,), generator=generator)


def plain(hidden, weight, bias, targets, scale, softcap):  # type: ignore[no-untyped-def]
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return torch.log_softmax(logits, -1).gather(1, targets[:, None]).squeeze(1)


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
@pytest.mark.parametrize(("with_bias", "scale", "softcap"), [(False, 1.0, None), (True, 0.25, None), (True, 2.0, 4.0)])
def test_values_and_gradients_equal_the_plain_path(chunk: int, with_bias: bool, scale: float, softcap: float) -> None:
    """O1, L3: bias, scale and soft-cap included, whatever the chunk."""
    hidden, weight, bias, targets = inputs()
    bias = bias if with_bias else None
    upstream = torch.linspace(-2, 2, S, dtype=torch.float64)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    expected = plain(hidden, weight, bias, targets, scale, softcap)
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), leaves)
    ours = Head(weight, bias, scale, softcap).per_token_logps(hidden, targets, chunk)
    assert torch.allclose(ours, expected, atol=1e-12)
    for got, wanted in zip(torch.autograd.grad((ours * upstream).sum(), leaves), expected_gradients, strict=True):
        assert torch.allclose(got, wanted, atol=1e-12)


def test_float32_is_exact_to_1e_5() -> None:
    hidden, weight, _, targets = inputs(torch.float32)
    ours = Head(weight).per_token_logps(hidden, targets, 8)
    expected = plain(hidden, weight, None, targets, 1.0, None)
    assert torch.allclose(ours, expected, atol=1e-5)
    got = torch.autograd.grad(ours.sum(), (hidden, weight))
    for one, other in zip(got, torch.autograd.grad(expected.sum(), (hidden, weight)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_frozen_head_gives_the_same_input_gradient() -> None:
    """The input gradient formed in the forward pass, with a soft-cap in between."""
    hidden, weight, bias, targets = inputs()
    frozen = Head(weight.detach(), bias.detach(), 0.5, 3.0).per_token_logps(hidden, targets, 5)
    trained = Head(weight, bias, 0.5, 3.0).per_token_logps(hidden, targets, 5)
    upstream = torch.linspace(-1, 3, S, dtype=torch.float64)
    one, = torch.autograd.grad((frozen * upstream).sum(), hidden)
    other, = torch.autograd.grad((trained * upstream).sum(), hidden)
    assert torch.allclose(one, other, atol=1e-13)


def test_gradcheck() -> None:
    hidden, weight, bias, targets = inputs()
    assert torch.autograd.gradcheck(
        lambda h, w, b: Head(w, b, 1.5, 6.0).per_token_logps(h, targets[:5], 2), (hidden[:5], weight, bias))


def test_a_head_of_zeros_gives_minus_log_vocabulary() -> None:
    """M3: uniform log-probs, whatever the hidden states."""
    hidden, weight, _, targets = inputs()
    logps = Head(torch.zeros_like(weight)).per_token_logps(hidden, targets)
    assert torch.allclose(logps, torch.full_like(logps, -torch.log(torch.tensor(float(V))).item()), atol=1e-6)


def test_huge_and_masked_logits_are_stable() -> None:
    """M4, N2: logits of 1e4 give finite log-probs and gradients."""
    hidden, weight, _, targets = inputs(torch.float32)
    logps = Head(weight * 1e4).per_token_logps(hidden, targets, 8)
    assert torch.isfinite(logps).all()
    gradient, = torch.autograd.grad(logps.sum(), hidden)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("positions", [512, 4096])
def test_logits_exist_for_one_chunk_only(positions: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """O1: the largest tensor that is formed does not grow with the number of positions."""
    monkeypatch.setattr("tropism.model.head.tiles.CPU_TILE", 64 * V)
    hidden = torch.randn(positions, D, requires_grad=True)
    weight = torch.randn(V, D, requires_grad=True)
    with Largest() as largest:
        Head(weight).per_token_logps(hidden, torch.zeros(positions, dtype=torch.int64)).sum().backward()
    assert largest.elements == max(64 * V, positions * D)


def test_scale_and_cap_come_from_the_config() -> None:
    """L3: a model's own logit scale and soft-cap are honored."""
    from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig

    small = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    for config in (CohereConfig(**small, logit_scale=0.3), GraniteConfig(**small, logits_scaling=7.0)):
        model = AutoModelForCausalLM.from_config(config).eval()
        ids = torch.randint(31, (1, 6), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None]).squeeze(1)
            hidden = model.model(ids).last_hidden_state[0, :-1]
            assert torch.allclose(head_of(model).per_token_logps(hidden, ids[0, 1:]), expected, atol=1e-5)
