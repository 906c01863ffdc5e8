"""The result depends on data, options and seed only: not on packs, workers, store, layout or ranks."""

import json
import multiprocessing
import signal
import socket
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from integration.conftest import assert_same_metrics, distance, records, weights
from processes import free_port, one_rank, run_ranks, start_fork_server

# The run's own bound: relative to the distance traveled; and (relative, absolute) of metrics.
BOUNDS = {"fp64": (1e-8, 0.0, 1e-8), "fp32": (3e-4, 1e-4, 1e-5)}
LAYOUT_BOUND = {"fp64": (1e-5, 1e-5, 1e-5), "fp32": (3e-4, 1e-4, 1e-5)}

VARIANTS: dict[str, dict[str, Any]] = {
    "small packs": {"microbatch_tokens": 256, "checkpointing": "selective"},
    "one tree a pack": {"microbatch_tokens": 16, "checkpointing": "full"},
    "large packs, workers, cold store": {"microbatch_tokens": 8192, "workers": 2, "prefetch": 2, "store": "cold"},
    "live reference": {"reference": "live"},
}

# Every kind of step: sorted over the whole step, a running mean, two denominators, beginnings, no reference, teachers.
# An epoch is 4 steps of 8 rows and a short one; six steps, logged two by two, go beyond it.
SHORT: dict[str, Any] = {"max_steps": 6, "log_every": 2, "eval_every": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "aot": ("dpo", {"loss": "aot"}),
    "aot_unpaired": ("dpo", {"loss": "aot_unpaired"}),
    "sigmoid and sft": ("dpo", {"loss": "sigmoid,sft", "loss_weights": "1,0.2"}),
    "ld and wpo": ("dpo", {"ld_alpha": 0.5, "wpo": True}),
    "simpo": ("dpo", {"loss": "simpo"}),
    "orpo": ("dpo", {"loss": "orpo"}),
    "bco": ("kto", {"loss": "bco"}),
    "kto and sft": ("kto", {"loss": "kto,sft"}),
    "sft": ("sft", {}),
    "kd": ("kd", {"teacher": "OTHER"}),
    "kd top-k": ("kd", {"teacher": "OTHER", "top_k": 5, "divergence": "js", "temperature": 2.0}),
    "dpo and a teacher": ("dpo", {"loss": "ipo", "teacher": "OTHER", "kd_weight": 0.3}),
}
WITHOUT_REFERENCE = {"simpo", "orpo", "sft", "kd", "kd top-k"}
LONG = {"kto": ("kto", {}), "dpo": ("dpo", {})}
SPECS = {**{(name, precision): (method, {"precision": precision, **options}) for name, (method, options) in LONG.items()
            for precision in BOUNDS},
         **{(name, "fp64"): (method, {"precision": "fp64", **SHORT, **options})
            for name, (method, options) in KINDS.items()},
         **{(name, "fp32"): (KINDS[name][0], {"precision": "fp32", **SHORT, **KINDS[name][1]})
            for name in ("aot_unpaired", "bco")}}
SOME = {("kto", "fp64"), ("dpo", "fp32"), ("aot_unpaired", "fp64"), ("bco", "fp64"), ("orpo", "fp64"),
        ("dpo and a teacher", "fp64"), ("kd", "fp64"), ("sft", "fp64")}
"""Specs of the default suite; the others take as long again, and are slow."""


def each(kinds: Mapping[str, Any]) -> Any:
    """One test for each spec of these kinds."""
    return pytest.mark.parametrize("spec", [
        pytest.param(spec, id="-".join(spec), marks=() if spec in SOME else pytest.mark.slow)
        for spec in SPECS if spec[0] in kinds])


@dataclass
class Bench:
    """Runs of the tiny model, each in a directory of its own; the plain run of a spec is made once.

    Args:
        folder: of runs and stores; holds the model `other`.
        model: the tiny model.
        data: of each method.
    """

    folder: Path
    model: Path
    data: dict[str, Path]
    plain: dict[tuple[str, str], Any] = field(default_factory=dict)

    def settings(self, name: str, method: str, **changes: Any) -> dict[str, Any]:
        """Options of a run whose directory is called `name`."""
        values = {"model": str(self.model), "data": str(self.data[method]), "output": str(self.folder / name),
                  "store": "store", "batch_size": 8, "max_steps": 20, "learning_rate": 1e-3, "samples": 0,
                  "microbatch_tokens": 1024, "eval_fraction": 0.2, "export_dtype": "float64", **changes}
        if method == "sft":
            values.pop("store")
        else:
            values["store"] = str(self.folder / values["store"])
        return {key: str(self.folder / "other") if value == "OTHER" else value for key, value in values.items()}

    def run(self, name: str, spec: tuple[str, str], **changes: Any) -> Any:
        from tropism.config import METHODS
        from tropism.runner import run

        method, options = SPECS[spec]
        return run(METHODS[method](**self.settings("-".join((*spec, name)), method, **{**options, **changes})))

    def base(self, spec: tuple[str, str]) -> Any:
        if spec not in self.plain:
            self.plain[spec] = self.run("base", spec)
        return self.plain[spec]

    def compare(self, spec: tuple[str, str], other: Any, bounds: tuple[float, float, float], what: str) -> None:
        """Weights, relative to the distance traveled, and every metric of training and evaluation."""
        base = self.base(spec)
        expected = weights(base.model)
        traveled = distance(expected, weights(self.model))
        assert traveled > 1e-3
        assert distance(weights(other.directory / "model"), expected) / traveled < bounds[0], what
        assert_same_metrics(records(other), records(base), bounds[1], bounds[2])


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path, feedback: Path, pairs: Path) -> Bench:
    folder = tmp_path_factory.mktemp("invariance")
    torch.manual_seed(8)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model_dir)).save_pretrained(folder / "other")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(folder / "other")
    texts = folder / "texts.jsonl"
    rows = [{key: row[key] for key in ("prompt", "completion")} for row in map(json.loads, feedback.open())]
    texts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Bench(folder, tiny_model_dir, {"kto": feedback, "dpo": pairs, "sft": texts, "kd": texts})


@each(LONG)
def test_nothing_but_data_options_and_seed_changes_the_result(bench: Bench, spec: tuple[str, str]) -> None:
    """L1, N5, P1, R4: weights after 20 steps, and every metric, short last steps included."""
    assert distance(weights(bench.base(spec).model), weights(bench.model)) > 1e-2
    sizes = {record["examples"] for record in records(bench.base(spec))[1:3]}
    assert sizes == {8, 16}
    for name, changes in VARIANTS.items():
        bench.compare(spec, bench.run(name, spec, **changes), BOUNDS[spec[1]], name)
    bench.compare(spec, bench.run("padded", spec, layout="padded", checkpointing="full"), LAYOUT_BOUND[spec[1]],
                  "padded")


@each(KINDS)
def test_nor_does_anything_else_change_other_kinds_of_steps(bench: Bench, spec: tuple[str, str]) -> None:
    """L1, L3, P1, R4: several such changes at once, for what needs the whole step, two denominators or a teacher."""
    live = {} if spec[0] in WITHOUT_REFERENCE else {"reference": "live"}
    bench.compare(spec, bench.run("trees", spec, microbatch_tokens=16, prefetch=2, checkpointing="full", **live),
                  BOUNDS[spec[1]], "one tree a pack")
    cold = {} if spec[0] == "sft" else {"store": "-".join((*spec, "cold"))}
    padded = bench.run("padded", spec, microbatch_tokens=300, layout="padded", checkpointing="selective", **cold)
    bench.compare(spec, padded, LAYOUT_BOUND[spec[1]], "padded")


def test_steps_shorter_than_the_batch_are_among_those_compared(bench: Bench) -> None:
    """The comparisons above go over epochs of 43 rows less the held-out ones: the last step is short."""
    for spec, window in ((("dpo", "fp64"), 8), (("aot", "fp64"), 16), (("sft", "fp64"), 16)):
        counts = [record["examples"] for record in records(bench.base(spec)) if record["split"] == "train"]
        taken = [after - before for before, after in zip([0, *counts], counts, strict=False)]
        assert min(taken) < window


def test_windows_pool_each_term_by_its_own_count(bench: Bench) -> None:
    """L1, K4: a record of several steps is the sum of sums over the sum of counts: rows, or supervised tokens."""
    spec = ("sigmoid and sft", "fp64")
    pooled = [line for line in records(bench.base(spec)) if line["split"] == "train"]
    single = [line for line in records(bench.run("single", spec, log_every=1)) if line["split"] == "train"]
    rows = [after - before for before, after in zip([0, *(line["examples"] for line in single)],
                                                    [line["examples"] for line in single], strict=False)]
    assert [line["step"] for line in pooled] == [2, 4, 6]
    uneven = False
    for number, line in enumerate(pooled):
        parts = slice(2 * number, 2 * number + 2)
        by_rows = sum(n * part["loss/sigmoid"] for n, part in zip(rows[parts], single[parts], strict=True))
        assert line["loss/sigmoid"] == pytest.approx(by_rows / sum(rows[parts]), rel=1e-12)
        assert line["loss"] == pytest.approx(line["loss/sigmoid"] + 0.2 * line["loss/sft"], rel=1e-12)
        ends = sorted(part["loss/sft"] for part in single[parts])
        assert ends[0] < line["loss/sft"] < ends[1]
        by_rows = sum(n * part["loss/sft"] for n, part in zip(rows[parts], single[parts], strict=True))
        uneven |= abs(line["loss/sft"] - by_rows / sum(rows[parts])) > 1e-6  # tokens, not rows
    assert uneven


@pytest.mark.some(3)
@pytest.mark.parametrize("name", [name for name in KINDS if name != "bco"])  # whose mean an evaluation leaves alone
def test_evaluation_of_the_training_rows_agrees_with_the_step(bench: Bench, name: str) -> None:
    """L5: the record of a step before its update is that of an evaluation of the same rows, in every term."""
    spec = (name, "fp64")
    lines = records(bench.run("eval", spec, eval_data=str(bench.data[KINDS[name][0]]), eval_fraction=0.0, batch_size=43,
                              shuffle=False, max_steps=2, eval_every=1, log_every=1, learning_rate=0.05,
                              optimizer="sgd"))
    steps, evaluations = ([line for line in lines if line["split"] == split] for split in ("train", "eval"))
    for step, evaluation in zip(steps, evaluations, strict=False):
        shared = {key for key in step.keys() & evaluation.keys() if key.split("/")[0] in (
            "loss", "kd", "rewards", "logps", "kl", "perplexity")} - {"kl/stderr"}
        assert {"loss"} < shared
        assert shared >= {key for key in step if key.startswith(("loss", "kd", "perplexity"))}
        assert {key: step[key] for key in shared} == pytest.approx({key: evaluation[key] for key in shared}, rel=1e-9,
                                                                   abs=1e-11)
    assert evaluations[0]["loss"] != evaluations[1]["loss"]


# --- ranks ------------------------------------------------------------------------------------------------------------


def _waiting(rank: int, size: int, port: int) -> None:
    signal.pause()


def test_ranks_that_outlive_the_limit_are_ended() -> None:
    """They would keep the test's own process from its end."""
    start_fork_server()
    before = set(multiprocessing.active_children())
    assert run_ranks(2, _waiting, limit_s=0.5) == [-1, -1]
    assert not set(multiprocessing.active_children()) - before


def test_the_port_of_ranks_is_theirs_alone() -> None:
    """Only who listens as a rank does gets it, from its choice to the end of the last rank."""
    with free_port() as port, socket.socket() as rank, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        rank.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        rank.bind(("127.0.0.1", port))
        rank.listen()


@dataclass(frozen=True)
class Left:
    """What a run of other processes left behind."""

    directory: Path


def some_per_pass(rank: int, size: int, port: int, jobs: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """`one_rank` where every other run gathers weights for each pass, as if memory were short."""
    from tropism.train.setup import build

    plain, short = build.choose_settings, {settings["output"] for _, settings in jobs[::2]}

    def chosen(inputs: Any, *rest: Any) -> Any:
        found = plain(inputs, *rest)
        once = found.settings.gather_once and inputs.options.output not in short
        return replace(found, settings=replace(found.settings, gather_once=once))

    build.choose_settings = chosen
    one_rank(rank, size, port, jobs)


@pytest.mark.parametrize("chosen", [pytest.param(SOME, id="some"),
                                    pytest.param({*SPECS} - SOME, id="others", marks=pytest.mark.slow)])
def test_two_ranks_equal_one_process(bench: Bench, chosen: Set[tuple[str, str]]) -> None:
    """L1, X1, K2: two gloo processes, uneven trees, packs of different numbers, and a store they build together.

    Weights and metrics of every spec; the running mean and the sorted values are those of all ranks.
    """
    jobs, left = [], {}
    # In the other precision these share their weights.
    copies = {("kto", "fp64"), ("dpo", "fp32"), ("aot_unpaired", "fp32"), ("bco", "fp32")}
    for spec in (spec for spec in SPECS if spec in chosen):
        method, options = SPECS[spec]
        name = "-".join((*spec, "two"))
        jobs.append((method, bench.settings(name, method, **{
            "store": "store-of-two", "samples": int(spec == ("kto", "fp32")), **options, "microbatch_tokens": 160,
            "parallel": {"shard": "off" if spec in copies else "on"}})))
        left[spec] = Left(bench.folder / name)
    assert run_ranks(2, some_per_pass, jobs) == [0, 0]
    for spec, found in left.items():
        bench.compare(spec, found, BOUNDS[spec[1]], f"{spec} on two ranks")


def test_more_ranks_than_trees_end_without_a_hang(bench: Bench, tmp_path: Path) -> None:
    """X1: a rank whose share of a step is empty runs empty packs; each row counts once."""
    words = ("oak", "elm", "ash")
    rows = {"kto": [{"prompt": f"{word}? ", "completion": word, "label": word == "oak"} for word in words],
            "dpo": [{"prompt": f"{word}? ", "chosen": word, "rejected": "no"} for word in words]}
    rows["kd"] = rows["sft"] = [{"prompt": row["prompt"], "completion": row["completion"]} for row in rows["kto"]]
    jobs = []
    for method, options in (("kto", {}), ("kto", {"loss": "bco,sft"}), ("dpo", {"loss": "aot", "ld_alpha": 0.5}),
                            ("dpo", {"wpo": True, "teacher": "OTHER"}), ("sft", {}),
                            ("kd", {"teacher": "OTHER", "top_k": 3})):
        data = tmp_path / f"{method}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows[method]))
        jobs.append((method, {**bench.settings(f"few-{len(jobs)}", method, store="store-of-few", **options),
                              "data": str(data), "batch_size": 2, "epochs": 2, "max_steps": None,
                              "eval_fraction": 0.0, "parallel": {"shard": "on"}}))
    assert run_ranks(3, one_rank, jobs) == [0] * 3
    for number in range(len(jobs)):
        assert records(Left(bench.folder / f"few-{number}"))[-1]["examples"] == 6
