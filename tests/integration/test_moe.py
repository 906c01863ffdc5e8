"""Runs of a mixture of experts with the routers' load-balancing loss: it depends on the step's rows alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm, MixtralTopKRouter

from integration.conftest import distance, records, weights
from integration.test_invariance import BOUNDS, LAYOUT_BOUND, SHORT, Bench, Left
from processes import one_rank, run_ranks
from tropism.config import METHODS
from tropism.data.batching.collate import collate
from tropism.data.tree import Completion, PromptTree
from tropism.errors import UsageError
from tropism.model.language_model import LanguageModel
from tropism.model.moe_router import RouterLogits, expert_counts

# One big pack, so that the load comes from the pass that is differentiated; KTO's mismatched pass reuses its prompts.
PLAIN = {"precision": "fp64", "router_aux_weight": 0.3, "microbatch_tokens": 8192, **SHORT}
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "kto": ("kto", {}), "dpo": ("dpo", {}), "sft": ("sft", {}),
    # These look ahead anyway, and beginnings of sides count for nothing.
    "bco": ("kto", {"loss": "bco"}), "aot": ("dpo", {"loss": "aot"}), "ld": ("dpo", {"ld_alpha": 0.5})}
EACH = pytest.mark.parametrize("name", SPECS)
EXACT = pytest.mark.parametrize("name", ["kto", "dpo", "sft"])
ROUNDED = ("ld", "bco")  # of which one comparison of layouts is enough


class MoeBench(Bench):
    """Runs of the tiny mixture of experts."""

    def run(self, name: str, spec: tuple[str, str], **changes: Any) -> Any:
        from tropism.runner import run

        method, options = SPECS[spec[0]]
        settings = self.settings("-".join((*spec, name)), method, **{**PLAIN, **options, **changes})
        return run(METHODS[method](**settings))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_moe_dir: Path, feedback: Path, pairs: Path) -> Bench:
    folder = tmp_path_factory.mktemp("moe")
    texts = folder / "texts.jsonl"
    rows = [{key: row[key] for key in ("prompt", "completion")} for row in map(json.loads, feedback.open())]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return MoeBench(folder, tiny_moe_dir, {"kto": feedback, "dpo": pairs, "sft": texts})


def steps(run: Any) -> list[dict[str, Any]]:
    return [line for line in records(run) if line["split"] == "train"]


@pytest.mark.some(2)
@EACH
def test_neither_packs_nor_layout_change_the_result(bench: Bench, name: str) -> None:
    """L1, P1: weights after six steps and every metric, one tree a pack against one pack; and padded."""
    spec = (name, "fp64")
    assert all(line["router_aux"] > 0 for line in steps(bench.base(spec)))
    bench.compare(spec, bench.run("trees", spec, microbatch_tokens=16), BOUNDS["fp64"], "one tree a pack")
    if name in ROUNDED:
        bench.compare(spec, bench.run("padded", spec, layout="padded", microbatch_tokens=300), LAYOUT_BOUND["fp64"],
                      "padded")


@EXACT
def test_layouts_agree_to_float64_where_norms_and_routers_do(bench: Bench, name: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: what the comparison above leaves is the float32 in which transformers computes norms and routers."""
    def norm(self: Any, states: torch.Tensor) -> torch.Tensor:
        return self.weight * states * (states.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    def router(self: Any, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = torch.nn.functional.linear(states.reshape(-1, self.hidden_dim), self.weight)
        values, indices = torch.softmax(logits, dim=-1).topk(self.top_k, dim=-1)
        return logits, values / values.sum(dim=-1, keepdim=True), indices

    monkeypatch.setattr(MixtralRMSNorm, "forward", norm)
    monkeypatch.setattr(MixtralTopKRouter, "forward", router)
    spec = (name, "fp64")
    own_store = {} if name == "sft" else {"store": "exact"}  # without scores of the model as it is
    tree, padded = (weights(bench.run(f"exact-{layout}", spec, layout=layout, **own_store).model)
                    for layout in ("tree", "padded"))
    assert distance(padded, tree) / distance(tree, weights(bench.model)) < BOUNDS["fp64"][0]


def test_two_ranks_equal_one_process(bench: Bench) -> None:
    """L1, X1: token fractions are those of all ranks, and ranks have packs of different numbers of trees."""
    jobs, left = [], {}
    for name in ("kto", "sft", "bco", "aot"):
        method, options = SPECS[name]
        for tokens in (64, 8192) if name == "kto" else (64,):
            place = f"{name}-two-{tokens}"
            jobs.append((method, bench.settings(place, method, **{**PLAIN, **options, "store": "store-of-two",
                                                                  "microbatch_tokens": tokens,
                                                                  "parallel": {"shard": "on"}})))
            left[name, tokens] = Left(bench.folder / place)
    assert run_ranks(2, one_rank, jobs) == [0, 0]
    for (name, tokens), run in left.items():
        bench.compare((name, "fp64"), run, BOUNDS["fp64"], f"{name} on two ranks, packs of {tokens}")


@EXACT
def test_loss_of_a_record_has_it_and_that_of_an_evaluation_has_not(bench: Bench, name: str) -> None:
    """L2, L3: before the first update both are known from a run without the option, which has no such metric."""
    spec = (name, "fp64")
    once = {"max_steps": 1, "log_every": 1, "eval_every": 0}
    plain = records(bench.run("without", spec, **once, router_aux_weight=0.0))
    ours = records(bench.run("with", spec, **once))
    assert not [key for line in plain for key in line if key.startswith("router")]
    assert ours[0] == plain[0]  # the evaluation before step 1
    one, other = ours[1], plain[1]
    assert one["loss"] == pytest.approx(other["loss"] + 0.3 * one["router_aux"], rel=1e-12)
    assert one.get("perplexity") == other.get("perplexity")


def test_windows_are_means_over_steps(bench: Bench) -> None:
    """L1: a record of two steps has the mean of both."""
    pooled = steps(bench.base(("sft", "fp64")))
    single = steps(bench.run("single", ("sft", "fp64"), log_every=1))
    for number, line in enumerate(pooled):
        parts = [part["router_aux"] for part in single[2 * number : 2 * number + 2]]
        assert line["router_aux"] == pytest.approx(sum(parts) / 2, rel=1e-12)


def unevenness(directory: Path, texts: Sequence[str]) -> float:
    """Spread of the experts' shares of tokens, over all layers, of some texts; 0 if all are equal."""
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    trees = [PromptTree(Completion.supervised(tokenizer(text).input_ids).ids, (Completion.supervised([1]),))
             for text in texts]
    model, routed = LanguageModel(module, "tree", "fp32", torch.device("cpu")), RouterLogits()
    batch = collate(trees, "tree")
    with torch.no_grad():
        model.hidden(batch, model.tree_pass(batch), routed)
    counted = expert_counts(routed.logits, torch.ones(batch.input_ids.numel(), dtype=torch.float64), 2)
    return float((counted[:-1] / counted[:-1].sum()).std())


def test_load_gets_more_even(bench: Bench, tmp_path: Path) -> None:
    """L3: a skewed router, and a large weight; the loss nears the number of experts per token."""
    module = AutoModelForCausalLM.from_pretrained(bench.model)
    with torch.no_grad():
        for layer in module.model.layers:
            layer.mlp.gate.weight[0] += 0.3 * layer.mlp.gate.weight[1] + 0.3
    module.save_pretrained(tmp_path / "skewed")
    AutoTokenizer.from_pretrained(bench.model).save_pretrained(tmp_path / "skewed")
    texts = [row["prompt"] + row["completion"] for row in map(json.loads, bench.data["sft"].open())]
    ends = {}
    for weight in (0.0, 10.0):
        ends[weight] = bench.run(f"even-{weight}", ("sft", "fp64"), model=str(tmp_path / "skewed"), precision="fp32",
                                 max_steps=30, log_every=1, eval_every=0, learning_rate=3e-3, schedule="constant",
                                 router_aux_weight=weight, export_dtype="float32")
    told = [line["router_aux"] for line in steps(ends[10.0])]
    assert told[-1] < told[0]
    spread = {weight: unevenness(run.model, texts) for weight, run in ends.items()}
    before = unevenness(tmp_path / "skewed", texts)
    assert spread[10.0] < 0.5 * min(before, spread[0.0])
    assert "experts_implementation" not in (ends[0.0].model / "config.json").read_text()


def test_without_experts_the_option_is_refused_before_anything_is_written(
        bench: Bench, tiny_model_dir: Path) -> None:
    """L3: naming it and the model."""
    with pytest.raises(UsageError, match=r"^--router-aux-weight 0\.3: LlamaForCausalLM"):
        bench.run("refused", ("sft", "fp64"), model=str(tiny_model_dir))
    assert not (bench.folder / "sft-fp64-refused").exists()


def test_coefficient_of_the_config_is_named(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """L3: Mixtral's config has one; once it is said that it has no effect, and nothing where the option is given."""
    for weight, times in ((0.0, 1), (0.1, 0)):
        bench.run(f"told-{weight}", ("sft", "fp64"), max_steps=1, router_aux_weight=weight)
        output = capsys.readouterr()
        assert (output.out + output.err).count("router_aux_loss_coef 0.001") == times


def test_the_extra_pass_is_counted_where_there_is_one(bench: Bench) -> None:
    """P1: `tokens/computed` says what was packed; a step of one pack needs no pass for the loss."""
    computed = {}
    for tokens in (16, 8192):
        for weight in (0.0, 0.3):
            run = bench.run(f"cost-{tokens}-{weight}", ("sft", "fp64"), max_steps=1, eval_every=0,
                            microbatch_tokens=tokens, router_aux_weight=weight)
            computed[tokens, weight] = steps(run)[0]["tokens/computed"]
    assert computed[16, 0.3] == 2 * computed[16, 0.0]
    assert computed[8192, 0.3] == computed[8192, 0.0]
