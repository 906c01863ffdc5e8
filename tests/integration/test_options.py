"""Every option of a loss changes it when it should, on every path, or is refused with both names.

The policy is moved away from its initial weights once the run is built, so that log-ratios are not 0 and every option
can show. What is compared is the loss that the first step logs, and that of an evaluation after it.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from integration.conftest import train_steps
from processes import run_ranks
from tropism.config import METHODS
from tropism.data.options import DataOptions
from tropism.distributed import World, connect
from tropism.errors import UsageError
from tropism.methods import LOSSES
from tropism.observe.console import Voice
from tropism.runner import PythonObjects, Run
from tropism.train.options import RunOptions, StoreOptions

# --- the table --------------------------------------------------------------------------------------------------------

ANY = "beta loss_weights"
TIED = f"{ANY} reference ld_alpha wpo"  # to a reference
LINKED = f"{TIED} f_divergence f_alpha"
RANKED = f"{ANY} reference ld_alpha label_smoothing"
CLASSES = f"{ANY} reference desirable_weight undesirable_weight"
FREE = f"{ANY} wpo"

EFFECTIVE: dict[str, dict[str, str]] = {
    "dpo": {
        "sigmoid": f"{LINKED} label_smoothing", "robust": f"{LINKED} label_smoothing", "ipo": LINKED,
        "ipo_mean": LINKED, "hinge": LINKED, "exo_pair": f"{LINKED} label_smoothing", "nca_pair": TIED,
        "bco_pair": TIED, "sppo_hard": TIED, "apo_zero": TIED, "apo_down": TIED, "discopop": f"{LINKED} discopop_tau",
        "sigmoid_norm": LINKED, "aot": RANKED, "aot_unpaired": RANKED, "simpo": f"{FREE} label_smoothing simpo_gamma",
        "cpo": f"{FREE} label_smoothing cpo_alpha", "orpo": FREE},
    "kto": dict.fromkeys(("kto", "apo_zero_unpaired", "kto_no_reference_point", "bco"), CLASSES)}
"""For each loss, the options that change it. All others of the method are refused with it."""

VALUES: dict[str, tuple[Any, ...]] = {
    "beta": (0.7,), "loss_weights": ("0.5",), "reference": ("OTHER",), "ld_alpha": (0.0, 0.6), "wpo": (True,),
    "f_divergence": ("forward_kl", "js", "alpha"), "f_alpha": (0.2, 2.0), "label_smoothing": (0.2,),
    "discopop_tau": (0.5,), "simpo_gamma": (1.5,), "cpo_alpha": (0.3,), "desirable_weight": (2.0,),
    "undesirable_weight": (0.5, "auto")}
"""Values other than any default."""

TEACHING: dict[str, tuple[Any, ...]] = {
    "kd_weight": (0.9,), "divergence": ("reverse_kl", "js", "skew", "tvd"), "divergence_mix": (0.3,),
    "temperature": (2.0,), "temperature_scaling": (False,), "top_k": (3,)}
WITH: dict[str, dict[str, Any]] = {"f_alpha": {"f_divergence": "alpha"}, "divergence_mix": {"divergence": "js"},
                                   "temperature_scaling": {"temperature": 2.0}}
"""What an option needs beside it to mean anything."""

_TAUGHT = {"teacher": "OTHER", "kd_weight": 0.3, "divergence": "js"}
PATHS: dict[str, dict[str, Any]] = {
    "tree": {"layout": "tree"},  # and the reference from the store
    "padded": {"layout": "padded", "microbatch_tokens": 16},
    "taught": {"layout": "tree", **_TAUGHT},
    "taught, live reference": {"layout": "tree", "reference": "live", **_TAUGHT}}

CASES = [(method, loss, option, value) for method, losses in EFFECTIVE.items() for loss, options in losses.items()
         for option in options.split() for value in VALUES[option]]
FIRST = [case for case in CASES if case[3] == VALUES[case[2]][0]]
"""One value of each: paths do not differ in more."""


def own_options(method: str) -> set[str]:
    """Options that say what is minimized; the others say on what, how long and where."""
    shared = {*DataOptions.model_fields, *RunOptions.model_fields, *StoreOptions.model_fields}
    return {*METHODS[method].model_fields} - shared - {"allow_reference_mismatch"}


def test_the_table_is_complete() -> None:
    """L3: a loss or an option without an entry fails here."""
    for method, losses in EFFECTIVE.items():
        rows = LOSSES[METHODS[method].view]
        assert losses.keys() == {name for name, loss in rows.items() if loss.reward}
        listed = {option for options in losses.values() for option in options.split()}
        assert own_options(method) == {*listed, *TEACHING, "loss", "teacher"}
        for name, options in losses.items():
            assert {*rows[name].options} <= {*options.split()}
    assert own_options("kd") == {*TEACHING, "teacher"}
    assert own_options("sft") == set()
    assert EFFECTIVE.keys() | {"sft", "kd"} == METHODS.keys()


# --- one first step ---------------------------------------------------------------------------------------------------

PAIRS = [("oak? ", "elm ash", "fir"), ("yew? ", "bay", "box fig may"), ("oak? ", "sea", "elm ash"),
         ("sun and sky? ", "oak oak", "fir fir fir"), ("yew? ", "may sun", "bay")]
FEEDBACK = [("oak? ", "elm ash", True), ("yew? ", "bay", False), ("oak? ", "sea", True), ("oak? ", "elm ash", False),
            ("sun and sky? ", "oak oak", True), ("yew? ", "may sun", True), ("sun and sky? ", "fir", False)]


class Bench:
    """A model of one layer, another one, and data; measures first steps.

    Args:
        folder: holds `rows-METHOD.jsonl`, the model `own` and the model `other`.
        world: this process among the others.
    """

    def __init__(self, folder: Path, world: World) -> None:
        self.folder = folder
        self.world = world
        self.tokenizer = AutoTokenizer.from_pretrained(folder / "own")
        self.module, self.other = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("own", "other"))
        self.initial = {name: weight.clone() for name, weight in self.module.state_dict().items()}
        generator = torch.Generator().manual_seed(5)
        self.moved = {name: weight + 0.1 * torch.randn(weight.shape, generator=generator)
                      for name, weight in self.initial.items() if name != "lm_head.weight"}
        self.known: dict[str, float] = {}

    def loss(self, method: str, path: dict[str, Any], **options: Any) -> float:
        """The first step's loss, less that of a teacher that only the path has."""
        key = json.dumps([method, path, options], sort_keys=True)
        if key not in self.known:
            self.known[key] = self._measure(method, {**path, **options}, path)
        return self.known[key]

    def _measure(self, method: str, options: dict[str, Any], path: dict[str, Any]) -> float:
        rows, store = str(self.folder / f"rows-{method}.jsonl"), str(self.folder / "store")
        settings = METHODS[method](
            model="own", data=rows, output="none", shuffle=False, max_steps=1, learning_rate=0.0, **options,
            eval_data=rows if path == PATHS["tree"] else None,
            **({"store": store} if "store" in METHODS[method].model_fields else {}))
        others = {name: self.other for name in ("reference", "teacher") if options.get(name) == "OTHER"}
        self.module.load_state_dict(self.initial)
        run = Run(settings, self.world, Voice(loud=False),
                  PythonObjects(model=self.module, tokenizer=self.tokenizer, **others))
        run.build()
        self.module.load_state_dict(self.moved, strict=False)
        first, = train_steps(run)
        if run.inputs.data.evaluation:
            assert run.evaluate()["loss"] == pytest.approx(first.metrics["loss"], rel=1e-5)  # L5
        added = path["kd_weight"] * first.metrics["kd/divergence"] if "kd_weight" in path else 0.0
        return first.metrics["loss"] - added


def write(folder: Path, model: Path) -> None:
    """What a bench needs."""
    for seed, name in ((7, "own"), (8, "other")):
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(model, num_hidden_layers=1)  # losses do not see layers
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder / name)
    rows: dict[str, Sequence[dict[str, Any]]] = {
        "dpo": [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS],
        "kto": [{"prompt": p, "completion": c, "label": label} for p, c, label in FEEDBACK],
        "kd": [{"prompt": p, "completion": c} for p, c, _ in FEEDBACK]}
    rows["sft"] = rows["kd"]
    for method, content in rows.items():
        (folder / f"rows-{method}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    write(folder, tiny_model_dir)
    return Bench(folder, World(0, 1, torch.device("cpu")))


def paths_of(method: str, loss: str, option: str, value: Any = None) -> list[str]:
    """Paths that a loss is tried on; one that names a reference can neither keep a live one nor do without."""
    if value is not None and value != VALUES[option][0]:
        return ["tree"]
    live = LOSSES[METHODS[method].view][loss].needs_reference and option != "reference"
    return ["tree", "padded", "taught, live reference" if live else "taught"]


@pytest.mark.some(80)
@pytest.mark.parametrize(("method", "loss", "option", "value"), CASES)
def test_an_option_changes_the_loss_on_every_path(bench: Bench, method: str, loss: str, option: str,
                                                  value: Any) -> None:
    """L3, R4, L5: tree, padded, stored and live reference, with a teacher beside it: one value, not the default's."""
    beside = WITH.get(option, {})
    found = {path: bench.loss(method, PATHS[path], loss=loss, **beside, **{option: value})
             for path in paths_of(method, loss, option, value)}
    default = bench.loss(method, PATHS["tree"], loss=loss, **beside)
    assert abs(found["tree"] - default) > 1e-6
    assert found == {path: pytest.approx(found["tree"], rel=1e-4) for path in found}
    for path in found:
        assert bench.loss(method, PATHS[path], loss=loss, **beside) == pytest.approx(default, rel=1e-4)


@pytest.mark.parametrize(("method", "loss"), [(method, loss) for method in EFFECTIVE for loss in EFFECTIVE[method]])
def test_an_option_that_would_do_nothing_is_refused(method: str, loss: str) -> None:
    """L3: with both names, before anything is read."""
    for option in own_options(method) - {"loss", "teacher", *TEACHING} - {*EFFECTIVE[method][loss].split()}:
        given = {"loss": loss, option: VALUES[option][0], **WITH.get(option, {})}
        with pytest.raises(UsageError) as error:
            METHODS[method](model="m", data="d", output="o", **given)
        named = [name for name in (option, *WITH.get(option, {})) if f"--{name.replace('_', '-')}" in str(error.value)]
        assert named, str(error.value)
        assert f"loss {loss}" in str(error.value)


@pytest.mark.parametrize(("method", "losses"), [("dpo", "sigmoid,sft"), ("dpo", "sft,orpo"), ("kto", "kto,sft")])
def test_weights_of_several_losses(bench: Bench, method: str, losses: str) -> None:
    """L1, L3: each weight counts, and what it weighs is the same on every path."""
    first, second = losses.split(",")
    needed = {loss for loss in (first, second) if loss != "sft"}
    values = {}
    for path in paths_of(method, needed.pop(), "loss_weights"):
        both, heavy_first, heavy_second = (bench.loss(method, PATHS[path], loss=losses, loss_weights=weights)
                                           for weights in ("1,0.2", "3,0.2", "1,0.7"))
        values[path] = (both, (heavy_first - both) / 2, (heavy_second - both) / 0.5)
    for whole, one, other in values.values():
        assert min(abs(one), abs(other)) > 1e-3
        assert whole == pytest.approx(one + 0.2 * other, rel=1e-5)
        assert (whole, one, other) == pytest.approx(values["tree"], rel=1e-4)


# --- teachers ---------------------------------------------------------------------------------------------------------

DISTILLED = [("kd", {}), ("dpo", {"loss": "orpo"}), ("kto", {"loss": "kto,sft"})]


@pytest.mark.some(12)
@pytest.mark.parametrize(("option", "value"), [(option, value) for option in TEACHING for value in TEACHING[option]])
@pytest.mark.parametrize(("method", "fixed"), DISTILLED, ids=lambda part: str(part))
def test_an_option_of_the_teacher_changes_the_loss(bench: Bench, method: str, fixed: dict[str, Any], option: str,
                                                   value: Any) -> None:
    """L3: with a live teacher and a stored one, in both layouts, for kd alone and added to other methods."""
    beside = {**fixed, "teacher": "OTHER", **WITH.get(option, {})}
    for kept in ({}, {"top_k": 5}):
        found = [bench.loss(method, {"layout": layout}, **{**beside, **kept, option: value})
                 for layout in ("tree", "padded")]
        default = bench.loss(method, {"layout": "tree"}, **beside, **kept)
        assert abs(found[0] - default) > 1e-6
        assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_a_teacher_changes_the_loss(bench: Bench) -> None:
    """L3: adding one, and taking another."""
    for method, loss in (("dpo", "sigmoid"), ("kto", "bco")):
        alone = bench.loss(method, PATHS["tree"], loss=loss)
        assert abs(bench.loss(method, PATHS["tree"], loss=loss, teacher="OTHER") - alone) > 1e-3
    taught = [bench.loss("kd", PATHS["tree"], teacher=teacher) for teacher in ("OTHER", str(bench.folder / "own"))]
    assert abs(taught[0] - taught[1]) > 1e-3
    assert abs(taught[0] - bench.loss("sft", PATHS["tree"])) > 1e-3


# --- two ranks --------------------------------------------------------------------------------------------------------


def _on_ranks(rank: int, size: int, port: int, folder: str, cases: Sequence[tuple[str, dict[str, Any]]]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with connect() as world:
        bench = Bench(Path(folder), world)
        found = [bench.loss(method, {"layout": "tree", "microbatch_tokens": 24}, **options)
                 for method, options in cases]
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(found))


def _sharded() -> Iterator[tuple[str, dict[str, Any]]]:
    for method, loss, option, value in FIRST:
        yield method, {"loss": loss, **WITH.get(option, {}), option: value}
    for method, fixed in DISTILLED:
        yield method, {**fixed, "teacher": "OTHER"}
        yield method, {**fixed, "teacher": "OTHER", "top_k": 5, "divergence": "skew"}


@pytest.mark.slow
def test_two_ranks_log_the_same_losses(bench: Bench) -> None:
    """L3, L1, X1: the whole table once more, sharded."""
    cases = list(_sharded())
    assert run_ranks(2, _on_ranks, str(bench.folder), cases) == [0, 0]
    wanted = [bench.loss(method, {"layout": "tree"}, **options) for method, options in cases]
    for rank in range(2):
        assert json.loads((bench.folder / f"rank-{rank}.json").read_text()) == pytest.approx(wanted, rel=1e-5)
