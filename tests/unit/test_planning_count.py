"""The count of a step on tensors without values: by hand, and few layers against all."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from helpers import row
from tropism.config import KDOptions, KTOOptions, SFTOptions
from tropism.data.schedule import Schedule
from tropism.distributed.world import World
from tropism.methods.build import build_method
from tropism.model.head import tiles
from tropism.train.frozen.teacher import compare_as
from tropism.train.planning.blueprint import Blueprint
from tropism.train.planning.count import Count, Counter
from tropism.train.planning.lengths import over_lengths
from tropism.train.planning.memory import KEPT
from tropism.train.planning.needs import held_in, measure, one_pack
from tropism.train.settings import Settings
from tropism.train.step_packs import StepPlanner

WIDTH, MLP, VOCABULARY, TOKENS = 32, 64, 120, 40
ROWS = [row(range(1 + n, 9 + n), range(20, 54), desirable=bool(n % 2), id=str(n)) for n in range(4)]


def llama(layers: int) -> Any:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
            tie_word_embeddings=False)).eval()


def planner(view: str, values: Any, tokens: int = 2048) -> StepPlanner:
    method = build_method(view, values, [row.desirable for row in ROWS], False)
    schedule = Schedule(tuple(range(4)), 4, 0, 1, None, False, False, method.needs_reference_point)
    return StepPlanner(ROWS, schedule, method, "tree", tokens, 128, World(0, 1, torch.device("cpu")))


def blueprint(layers: int, options: Any, method: Any, **parts: Any) -> Blueprint:
    return Blueprint(options, llama(layers), "tree", "fp32", method, **parts)


def test_the_matrix_products_of_a_step_are_those_of_its_tokens() -> None:
    """6 FLOPs per weight of the layers and token; the head's are apart, with its logits computed twice at most."""
    options = SFTOptions(model="m", data="d", output="o")
    plan = planner("single", options.values)
    step = plan.packs_of(1)
    count = blueprint(1, options, plan.method).count([step])
    per_layer = WIDTH * WIDTH * 2 + WIDTH * WIDTH + 3 * WIDTH * MLP  # q, o; k and v of half the size; gate, up, down
    tokens = sum(pack.batch.tokens for pack in step.packs)
    assert count.costs["products"].flops == 6 * per_layer * tokens
    supervised = sum(len(pack.batch.target_ids) for pack in step.packs)
    assert count.costs["head"].flops in (6 * supervised * WIDTH * VOCABULARY, 8 * supervised * WIDTH * VOCABULARY)
    weights = 4 * (per_layer + 2 * WIDTH + WIDTH + 2 * WIDTH * VOCABULARY)
    held = held_in(count)
    assert weights <= held["weights"] <= weights + 200  # buffers of the rotary embedding
    assert held["gradients"] == weights
    assert 2 * weights <= held["optimizer"] <= 2 * weights + 1000
    assert count.waits == 0


@pytest.mark.some(1)
@pytest.mark.parametrize(("method", "checkpointing"), [
    ("kto", "none"), ("kto", "full"), pytest.param("kd", "none", marks=pytest.mark.slow),
    pytest.param("live", "selective", marks=pytest.mark.slow)])
def test_few_layers_give_the_count_of_all(method: str, checkpointing: Any) -> None:
    """Also with a teacher of another depth, a live reference and leaves that continue prompts."""
    options: Any = KDOptions(model="m", data="d", output="o", teacher="t") if method == "kd" else KTOOptions(
        model="m", data="d", output="o")
    plan = planner(options.view, options.values, 80)
    parts: dict[str, Any] = {"reference": {"kto": "stored", "live": "live"}.get(method)}
    if method == "kd":
        parts |= {"teacher": llama(4), "comparison": compare_as(options, VOCABULARY)}
    drawn = blueprint(5, options, plan.method, **parts)
    step = plan.packs_of(1)
    assert len(step.packs) > 1
    quick, full = drawn.count([step], checkpointing), drawn._engine(checkpointing, [None, None]).count([step])
    for kind, cost in full.costs.items():
        for name in ("flops", "bytes", "launches"):
            assert getattr(quick.costs[kind], name) == pytest.approx(getattr(cost, name), rel=1e-6), (kind, name)
    assert quick.peak == pytest.approx(full.peak, rel=0.02)
    assert (held_in(quick)["teacher"] > 0) is (method == "kd")
    assert (held_in(quick)["reference"] > 0) is (method == "live")


def test_checkpointing_needs_less_memory_and_more_products() -> None:
    options = SFTOptions(model="m", data="d", output="o")
    plan = planner("single", options.values)
    drawn = blueprint(4, options, plan.method)
    peaks = [drawn.count([plan.packs_of(1)], level).peaks["0 forward"]["activations"]
             for level in ("none", "selective", "full")]
    assert peaks[0] > peaks[1] > peaks[2]
    recomputed = drawn.count([plan.packs_of(1)], "full").costs["products"].flops
    assert recomputed > 1.2 * drawn.count([plan.packs_of(1)]).costs["products"].flops


def test_packs_of_two_sizes_tell_those_between() -> None:
    """The prediction at another size is the count there."""
    options = KTOOptions(model="m", data="d", output="o")
    plan = planner("unpaired", options.values, 200)
    drawn = blueprint(4, options, plan.method, reference="stored")
    needs = measure(drawn, plan, 200, 1000.0, Settings())
    assert needs.small.tokens < needs.large.tokens
    between = one_pack(planner("unpaired", options.values, 90).packs_of(1))
    count = drawn.count([between])
    predicted = needs.components(between.packs[0].batch.tokens, several=False)
    assert sum(predicted.values()) - 1000 == pytest.approx(count.peak, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("options", [KTOOptions(model="m", data="d", output="o", loss=loss) for loss in ("kto", "bco")],
                         ids=lambda options: options.loss)
def test_packs_that_wait_for_their_backward_passes_keep_what_is_predicted(options: Any) -> None:
    """Between its passes a pack keeps the inputs of layers, and no keys and values of its prompts."""
    plan = planner("unpaired", options.values, 45)
    drawn = blueprint(4, options, plan.method, reference="stored")
    settings = Settings(45, "full", forwards_first_tokens=10_000)
    step = plan.under(settings).packs_of(1)
    assert step.forwards_first
    assert len(step.packs) > 2
    tokens = [pack.batch.tokens for pack in step.packs]
    needs = measure(drawn, plan, 90, 0.0, settings)
    assert needs.large.phases[KEPT].get("prompt keys/values", 0.0) == 0.0
    inputs = 4 * 4 * WIDTH
    assert inputs < needs.kept_per_token < 3.5 * inputs  # the head and the last norm too
    count = drawn.count([step], "full")
    predicted = sum(needs.components(max(tokens), waiting=sum(tokens) - max(tokens)).values())
    assert predicted == pytest.approx(count.peak, rel=0.06)
    assert count.peak > drawn.count([plan.packs_of(1)], "full").peak


def test_live_memory_is_followed_until_it_is_freed() -> None:
    counter = Counter()
    with FakeTensorMode(), counter:
        kept = torch.empty(1000)
        with counter.allocating("other"):
            gone = torch.empty(500) + 1
            view = gone[:10]
        del gone
        assert counter.count.live == {"activations": 4000, "other": 2000}  # the view keeps it
        del view
        assert counter.count.live["other"] == 0
        counter.hold(kept, "weights")
        assert counter.count.live["weights"] == 4000
    assert counter.count.peak == 8000
    assert counter.count.total().launches == 1


def test_reads_by_the_host_are_counted() -> None:
    counter = Counter()
    with FakeTensorMode(), counter:
        values = torch.empty(3)
        assert float(values.sum()) == 1.0
        assert bool((values > 0).any())
    assert counter.count.waits == 2
    assert isinstance(counter.count, Count)


def test_attention_of_a_gpu_is_one_call() -> None:
    options = SFTOptions(model="m", data="d", output="o")
    plan = planner("single", options.values)
    step = plan.packs_of(1)
    host, gpu = (blueprint(2, options, plan.method, gpu=gpu).count([step]) for gpu in (False, True))
    assert gpu.costs["attention"].launches == 2 * 3 * len(step.packs)
    assert gpu.costs["products"].flops == host.costs["products"].flops
    assert 0.5 < gpu.costs["attention"].flops / host.costs["attention"].flops < 2
    with torch.device("meta"):
        capped = Gemma2ForCausalLM(Gemma2Config(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=2, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)).eval()
    flex = Blueprint(options, capped, "tree", "fp32", plan.method, gpu=True).count([step])
    assert flex.costs["attention"].launches == gpu.costs["attention"].launches


def test_blocks_of_a_tile_are_counted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head whose tiles are cut into blocks of two rows costs what it costs, though one block is computed."""
    options = SFTOptions(model="m", data="d", output="o")
    plan = planner("single", options.values)
    drawn, step = blueprint(1, options, plan.method), plan.packs_of(1)
    whole = drawn.count([step]).costs["head"]
    monkeypatch.setattr(tiles, "CPU_BLOCK", 2 * VOCABULARY)
    cut = drawn.count([step]).costs["head"]
    assert cut.flops == whole.flops
    assert cut.bytes == pytest.approx(whole.bytes, rel=0.05)
    assert cut.launches > 5 * whole.launches


def test_the_head_of_a_gpu_has_its_tiles_and_kernels() -> None:
    """Also on a machine without one: tiles are larger, and a tile is read once forwards."""
    counter = Counter()
    weight = torch.zeros(4, 2)
    with tiles.planning(tiles.Planned(True, counter.repeated)):
        assert tiles.tile_elements(weight) == tiles.GPU_TILE
    assert tiles.tile_elements(weight) == tiles.CPU_TILE
    options = SFTOptions(model="m", data="d", output="o")
    plan = planner("single", options.values)
    host, gpu = (blueprint(1, options, plan.method, gpu=gpu).count([plan.packs_of(1)]).costs["head"]
                 for gpu in (False, True))
    assert gpu.flops == host.flops
    assert gpu.launches < host.launches
    assert gpu.bytes < 0.8 * host.bytes


@pytest.mark.parametrize("loop", [True, False])
def test_polynomials_of_the_length_are_continued(loop: bool) -> None:
    """Work is quadratic, memory linear; lines without a loop, or short ones, are counted as they are."""
    plan = planner("single", SFTOptions(model="m", data="d", output="o").values)
    lengths = []

    def count(steps: Any) -> Count:
        length = steps[0].packs[0].batch.input_ids.shape[1]
        assert int(steps[0].packs[0].batch.predict_index.max()) < steps[0].packs[0].batch.input_ids.numel()
        lengths.append(length)
        found = Count(peaks={"forward": {"activations": 5.0 + 3 * length}})
        found.costs["products"].flops, found.costs["products"].launches = 2 * length**2 + 7 * length, 9 + length * loop
        return found

    rows = [row(range(1, 90), range(100, 100 + 400), id="0")]
    schedule = Schedule((0,), 1, 0, 1, None, False, False, False)
    step = StepPlanner(rows, schedule, plan.method, "padded", 2048, 512, World(0, 1, torch.device("cpu"))).packs_of(1)
    found, length = over_lengths(count, [step]), 89 + 399
    assert found.costs["products"].flops == pytest.approx(2 * length**2 + 7 * length)
    assert found.peaks["forward"]["activations"] == pytest.approx(5 + 3 * length)
    assert lengths == ([8, 16, 24] if loop else [8, 16, length])
    over_lengths(count, [replace(plan, layout="padded").packs_of(1)])
    assert len(lengths) == 4


@pytest.mark.slow
def test_short_lines_tell_what_loops_over_tokens_take() -> None:
    """A recurrence in Python is not followed token by token."""
    with torch.device("meta"):
        mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=1,
                                             state_size=4)).eval()
    options = SFTOptions(model="m", data="d", output="o")
    plan = planner("single", options.values)
    long = [row(range(1, 40), range(95), id="0")]
    step = StepPlanner(long, Schedule((0,), 1, 0, 1, None, False, False, False), plan.method, "padded", 2048, 512,
                       World(0, 1, torch.device("cpu"))).packs_of(1)
    drawn = Blueprint(options, mamba, "padded", "fp32", plan.method)
    quick, full = drawn.count([step]), drawn._with_all_layers([step], "none", None)
    assert quick.total().launches > 1000
    for name in ("flops", "bytes", "launches"):
        assert getattr(quick.total(), name) == pytest.approx(getattr(full.total(), name), rel=0.02), name
    assert quick.peak == pytest.approx(full.peak, rel=0.03)


def test_experts_are_counted_in_any_precision() -> None:
    with torch.device("meta"):
        module = MixtralForCausalLM(MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=MLP, num_hidden_layers=1, num_local_experts=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)).eval()
    options = SFTOptions(model="m", data="d", output="o")
    plan = planner("single", options.values)
    step = plan.packs_of(1)
    count = Blueprint(options, module, "tree", "fp32", plan.method).count([step])
    tokens = sum(pack.batch.tokens for pack in step.packs)
    assert count.costs["products"].flops > 6 * 2 * 3 * WIDTH * MLP * tokens  # two experts a token
    assert held_in(count)["gradients"] == sum(4 * weight.numel() for weight in module.parameters())
