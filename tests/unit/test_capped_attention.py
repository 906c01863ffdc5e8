"""FlexAttention, uncompiled on the CPU, gives what plain operations give. Compiled code serves packs of any size."""

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from attention_gradients import logps_and_gradient
from helpers import tree
from tropism.data.batching.collate import collate, collate_leaves
from tropism.model import attention as tree_attention
from tropism.model import capped_attention as capped
from tropism.model.attention import TreePass
from unit.test_attention_coverage import CPU, build, forest

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Flex on the CPU, where torch refuses a backward pass of the same code; the number of its calls."""
    torch._dynamo.reset()  # "uncompiled" is the compiler's eager backend, with its limit of versions
    calls: list[int] = []

    def uncompiled(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].shape[2])
        return torch_flex.flex_attention(*args, **kwargs)

    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(capped, "_compiled", lambda: uncompiled)
    monkeypatch.setattr(tree_attention, "serves", lambda *_: True)
    return calls


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_models_with_caps_and_sinks(monkeypatch: pytest.MonkeyPatch, on_cpu: list[int], name: str) -> None:
    """Log-probs and gradients of full models: windows, grouped heads, many trees."""
    model = build(name)
    found = logps_and_gradient(model, "tree", forest())
    assert on_cpu == [256, 256]
    monkeypatch.setattr(tree_attention, "serves", lambda *_: False)
    right = logps_and_gradient(model, "tree", forest())
    assert len(on_cpu) == 2
    for got, expected in zip(found, right, strict=True):
        assert (got - expected).norm() < 1e-10 * expected.norm()


def long_trees() -> list[Any]:
    """Trees whose prompts and completions cross the borders of blocks."""
    return [tree(range(150), range(140), range(3), range(70)), tree(range(2), range(300)), tree(range(40), range(1))]


@pytest.mark.parametrize("window", [None, 1, 6, 135, 200])
@pytest.mark.parametrize("leaves", [False, True])
def test_visible_keys_are_those_of_the_gathered_ones(window: int | None, leaves: bool) -> None:
    """Each query's keys, and the blocks that hold them; also of completions that continue another pass."""
    trees = long_trees()
    batch = collate_leaves(trees, trees) if leaves else collate(trees, "tree")
    segments = batch.segments
    assert segments is not None
    queries = batch.input_ids.shape[1]
    keys = queries + (sum(one.tokens for one in trees) if leaves else 0)
    right = torch.zeros(queries, keys, dtype=torch.bool)
    query = at = 0
    for count, width in zip(segments.query_lengths, segments.key_lengths, strict=True):
        own = segments.key_index[at : at + width]
        for number in range(count):
            end = width - count + number + 1
            right[query + number, own[max(0, end - window) if window else 0 : end]] = True
        query, at = query + count, at + width
    seen = capped.visible(segments, keys, window)
    assert seen.queries % 128 == seen.keys % 128 == 0
    grid = torch.meshgrid(torch.arange(seen.queries), torch.arange(seen.keys), indexing="ij")
    found = seen.blocks.mask_mod(torch.tensor(0), torch.tensor(0), *grid)
    assert torch.equal(found[:queries, :keys], right)
    assert found.any(1).all()
    assert not found[:, keys:].any()
    tiles = found.view(seen.queries // 128, 128, seen.keys // 128, 128).transpose(1, 2).flatten(2)
    assert torch.equal(seen.blocks.to_dense()[0, 0].bool(), tiles.any(2))


@pytest.mark.parametrize(("softcap", "with_sinks", "heads", "scaling"), [
    (3.0, False, (4, 2), 0.2), (None, True, (8, 1), 0.35), (2.0, True, (3, 3), 1.0)])
@pytest.mark.parametrize("window", [None, 135])
def test_attention_of_a_pack(monkeypatch: pytest.MonkeyPatch, on_cpu: list[int], window: int | None,
                             softcap: float | None, with_sinks: bool, heads: tuple[int, int], scaling: float) -> None:
    """Outputs and gradients in fp32, over blocks that are seen in full, in part and not at all."""
    batch, draw = collate(long_trees(), "tree"), torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).requires_grad_()

    tokens = batch.input_ids.shape[1]
    inputs: Any = [drawn(1, count, tokens, 8) for count in (heads[0], heads[1], heads[1])]
    sinks = drawn(heads[0]) if with_sinks else None
    upstream = drawn(1, tokens, heads[0], 8).detach()
    results = []
    for flex in (True, False):
        monkeypatch.setattr(tree_attention, "serves", lambda *_, flex=flex: flex)
        assert batch.segments is not None
        out, _ = tree_attention.tree_attention(
            torch.nn.Module(), *inputs, None, scaling, tree=TreePass(batch.segments), sliding_window=window,
            softcap=softcap, s_aux=sinks)
        results.append([out, *torch.autograd.grad(out, [*inputs, *([] if sinks is None else [sinks])], upstream)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert len(on_cpu) == 1


@pytest.mark.slow
def test_packs_of_other_sizes_compile_nothing_new() -> None:
    """One graph for all packs, also beside compiled layers, where the attention itself is left as it is."""
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    call = torch.compile(torch_flex.flex_attention, dynamic=True, fullgraph=True, backend=backend)

    @torch.compiler.disable
    def attend(trees: list[Any], window: int | None) -> torch.Tensor:
        batch = collate(trees, "tree")
        assert batch.segments is not None
        tokens = batch.input_ids.shape[1]
        query, key = torch.ones(1, 4, tokens, 8), torch.ones(1, 2, tokens, 8)
        with torch.no_grad():
            return capped.flex(query, key, key, capped.visible(batch.segments, tokens, window), 0.3, 3.0,
                               torch.zeros(4), call)

    whole = long_trees()
    attend(whole, None)
    first = len(graphs)
    assert first
    for trees in (whole[:1], whole[1:], whole * 2, whole[2:], whole[:2], whole * 3):
        for window in (None, 6):
            assert torch.isfinite(attend(trees, window)).all()
    assert len(graphs) == first


def test_plain_operations_remain_where_flex_does_not_compile_or_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()

    def trial(found: Any) -> bool:
        monkeypatch.setattr(capped, "_compiled", lambda: found)
        monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
        capped._agrees.cache_clear()
        return capped._agrees(CPU, torch.float32, 4, 2, 8, 3.0, True)

    def stops(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no compiler")

    def doubles(*args: Any, **kwargs: Any) -> Any:
        out, extra = torch_flex.flex_attention(*args, **kwargs)
        return 2 * out, extra

    assert trial(torch_flex.flex_attention)
    assert not trial(stops)
    assert not trial(doubles)
    assert not capped.serves(torch.ones(1, 4, 3, 8), torch.ones(1, 2, 3, 8), 3.0, False)
    capped._agrees.cache_clear()
