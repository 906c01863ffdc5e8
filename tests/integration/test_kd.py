"""Distillation runs, alone and added to DPO and KTO: the loss, the student that is its teacher, vocabularies."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from helpers import build_tokenizer
from integration import distillation
from integration.conftest import assert_same_metrics, distance, records, weights
from integration.distillation import VOCABULARY, WHOLE, WORLD, Said, first, make_model, moved
from tropism import KDTrainer
from tropism.cli.app import main
from tropism.errors import ModelError, UsageError
from tropism.losses.divergence import DIVERGENCES
from tropism.model import load
from tropism.runner import Run

options, distill, texts = distillation.options, distillation.distill, distillation.texts
teacher_dir, padded_teacher_dir = distillation.teacher_dir, distillation.padded_teacher_dir


def by_hand(options: Any, temperature: float = 1.0) -> tuple[float, float]:
    """Mean cross-entropy and mean KL(teacher || student) over all supervised tokens of all rows, by full logits."""
    rows = Run(options, WORLD, Said()).inputs.data.train
    student, teacher = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
                        for path in (options.model, options.teacher))
    entropy = divergence = tokens = 0.0
    for row in rows:
        for completion in row.completions:
            ids = torch.tensor([[*row.prompt_ids.tolist(), *completion.ids.tolist()]])
            with torch.no_grad():
                ours, theirs = (model(ids).logits[0, len(row.prompt_ids) - 1 : -1] for model in (student, teacher))
            entropy -= ours.log_softmax(-1).gather(1, ids[0, len(row.prompt_ids) :, None]).sum().item()
            log_p, log_q = ((logits[:, :VOCABULARY] / temperature).log_softmax(-1) for logits in (theirs, ours))
            divergence += (log_p.exp() * (log_p - log_q)).sum().item()
            tokens += len(completion.ids)
    return entropy / tokens, divergence / tokens


# --- the loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "key", "known"), [
    ("kd", "kd/ce", None), ("dpo", "loss/sigmoid", 0.6931471805599453), ("kto", "loss/kto", 0.5)])
def test_the_first_loss_by_hand(distill: Callable[..., Any], options: Callable[..., Any], method: str, key: str,
                                known: float | None) -> None:
    """L1, L2: (1 - w) CE + w D alone, L + w D beside another loss; D over the tokens of both sides of a pair."""
    entropy, divergence = by_hand(options(method), temperature=2.0)
    record = first(distill(method, **WHOLE, kd_weight=0.3, temperature=2.0))
    assert record["kd/divergence"] == pytest.approx(4 * divergence, rel=1e-6)
    assert record[key] == pytest.approx(entropy if known is None else known, rel=1e-6)
    share = 0.7 if method == "kd" else 1.0
    assert record["loss"] == pytest.approx(share * record[key] + 0.3 * record["kd/divergence"], rel=1e-12)
    if method == "kd":
        assert record["perplexity"] == pytest.approx(math.exp(record["kd/ce"]), rel=1e-12)


def test_three_terms_have_three_denominators(distill: Callable[..., Any]) -> None:
    """L1: pairs, tokens of the chosen sides, and tokens of both sides."""
    weighed = distill("dpo", **WHOLE, loss="sigmoid,sft", loss_weights="1,0.2", kd_weight=0.25)
    record, alone = first(weighed), first(distill("dpo", **WHOLE, loss="sigmoid,sft", teacher=None))
    assert record["loss/sft"] == pytest.approx(alone["loss/sft"], rel=1e-9)
    assert record["loss"] == pytest.approx(
        record["loss/sigmoid"] + 0.2 * record["loss/sft"] + 0.25 * record["kd/divergence"], rel=1e-12)


def test_what_other_losses_do_to_pairs_leaves_the_divergence(distill: Callable[..., Any]) -> None:
    """L3: beginnings of completions (ld_alpha), weights of pairs (wpo) and sorting (aot) are no matter of D."""
    for top_k in (None, 4):
        plain = first(distill("dpo", **WHOLE, top_k=top_k))
        for changes in ({"ld_alpha": 0.5, "wpo": True}, {"loss": "aot"}):
            record = first(distill("dpo", **WHOLE, top_k=top_k, **changes))
            assert record["kd/divergence"] == pytest.approx(plain["kd/divergence"], rel=1e-9)


@pytest.mark.parametrize("method", ["kd", "dpo", "kto"])
def test_the_gradient_is_linear_in_kd_weight(distill: Callable[..., Any], tiny_model_dir: Path, method: str) -> None:
    """L1, L3: one SGD step; kd_weight 0 is the method without a teacher, and a half lies half-way to 1.

    Also in float64 transformers' norms pass gradients through float32.
    """
    plain = {**WHOLE, "optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
    none, half, whole = (moved(distill(method, **plain, kd_weight=weight), tiny_model_dir)
                         for weight in (0.0, 0.5, 1.0))
    alone = {"method": "sft", "store": None} if method == "kd" else {"method": method}
    without = moved(distill(**alone, **plain, teacher=None), tiny_model_dir)
    traveled = distance(weights(tiny_model_dir), {n: w + whole[n] for n, w in weights(tiny_model_dir).items()})
    assert traveled > 1e-3
    assert distance(none, without) < 1e-7 * traveled
    assert distance(whole, none) > 0.1 * traveled
    assert distance(half, {name: (none[name] + whole[name]) / 2 for name in none}) < 1e-7 * traveled


def test_every_option_changes_the_loss(distill: Callable[..., Any]) -> None:
    """L2, L3: divergence, mix, temperature, scaling and k, live and stored; the scaling is a factor of T^2."""
    variants: list[dict[str, Any]] = [
        {"temperature": 2.0}, {"temperature": 2.0, "temperature_scaling": False}, {},
        {"divergence": "js"}, {"divergence": "js", "divergence_mix": 0.2}, {"divergence": "skew"},
        {"divergence": "skew", "divergence_mix": 0.5}, {"divergence": "reverse_kl"}, {"divergence": "tvd"}]
    live, stored = ([first(distill(**WHOLE, **changes, **how))["kd/divergence"] for changes in variants[:count]]
                    for how, count in (({}, len(variants)), ({"top_k": 5}, 5)))
    assert len({round(value, 6) for value in live + stored}) == len(live) + len(stored)
    for seen in (live, stored):
        assert seen[0] == pytest.approx(4 * seen[1], rel=1e-12)
    assert first(distill(**WHOLE, divergence="forward_kl"))["kd/divergence"] == live[2]


def test_the_reading_is_said(distill: Callable[..., Any]) -> None:
    """L2: which divergence, at which temperature, with or without T^2, over what."""
    voice = Said()
    distill(voice=voice, max_steps=1, divergence="js", temperature=2.0)
    assert ("js, Jensen-Shannon, mixing weight 0.5, temperature 2, times T^2; live, over the full "
            "vocabulary") in voice.text
    voice = Said()
    distill(voice=voice, max_steps=1, temperature=2.0, temperature_scaling=False, top_k=3)
    assert ("forward_kl, KL(teacher || student), temperature 2, not multiplied by T^2; stored top 3 tokens and the "
            "tail as one more outcome") in voice.text


# --- the student that is its teacher, and the teacher that stays what it is -------------------------------------------


@pytest.mark.some(4)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_a_student_that_is_its_teacher_stays(distill: Callable[..., Any], tiny_model_dir: Path, divergence: str,
                                             precision: str) -> None:
    """L2: divergence and gradient are exactly 0, before training and after, and no weight changes by a bit."""
    result = distill(teacher=str(tiny_model_dir), kd_weight=1.0, eval_fraction=0.3, temperature=2.0,
                    divergence=divergence, precision=precision)
    assert [record["kd/divergence"] for record in records(result)] == [0.0] * 7
    assert [record["grad_norm"] for record in records(result) if record["split"] == "train"] == [0.0] * 3
    assert distance(weights(result.model), weights(tiny_model_dir)) == 0.0


def test_a_stored_teacher_that_is_the_student(distill: Callable[..., Any], tiny_model_dir: Path) -> None:
    """L4: other packs, so rounding is all that is left of the divergence."""
    result = distill(teacher=str(tiny_model_dir), kd_weight=1.0, eval_fraction=0.3, top_k=4)
    assert all(abs(record["kd/divergence"]) < 1e-7 for record in records(result)[:2])


def test_the_teacher_does_not_learn(tiny_model_dir: Path, teacher_dir: Path, texts: Path, tmp_path: Path) -> None:
    """L2: a module as teacher: its weights stay and collect no gradient, the student's change."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(path) for path in (tiny_model_dir, teacher_dir))
    before = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    KDTrainer(student, teacher_model=teacher, train_dataset=str(texts), output=str(tmp_path / "run"), max_steps=2,
              learning_rate=1e-2, samples=0, voice=Said()).fit()
    assert all(torch.equal(weight, before[name]) for name, weight in teacher.state_dict().items())
    assert all(weight.grad is None for weight in teacher.parameters())
    assert distance(weights(tmp_path / "run" / "model"), weights(tiny_model_dir)) > 1e-2


# --- vocabularies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [None, 6])
def test_a_padded_head_changes_nothing(distill: Callable[..., Any], tiny_model_dir: Path, teacher_dir: Path,
                                       padded_teacher_dir: Path, top_k: int | None) -> None:
    """V1: columns that no token has are left out, on the teacher's side and on the student's."""
    said = Said()
    how = {"top_k": top_k, "eval_fraction": 0.3, "precision": "fp64", "export_dtype": "float64"}
    plain, padded = distill(**how), distill(voice=said, **how, teacher=str(padded_teacher_dir))
    assert "output columns beyond the tokenizer's 102 tokens are ignored" in said.text
    assert_same_metrics(records(padded), records(plain), 1e-8, 1e-10)
    assert distance(weights(padded.model), weights(plain.model)) < 1e-9
    student, wide = (first(distill(**WHOLE, top_k=top_k, model=str(model), teacher=str(tiny_model_dir)))
                     for model in (teacher_dir, padded_teacher_dir))
    assert wide["kd/divergence"] == pytest.approx(student["kd/divergence"], rel=1e-9)
    assert wide["kd/ce"] > student["kd/ce"] + 0.1


@pytest.mark.parametrize("top_k", [None, VOCABULARY - 1])
def test_both_heads_padded(distill: Callable[..., Any], options: Callable[..., Any], tiny_model_dir: Path,
                           padded_teacher_dir: Path, tmp_path: Path, top_k: int | None) -> None:
    """V1: the vocabulary is the tokenizer's, not what the two heads have in common."""
    wide = make_model(tmp_path / "wide", tiny_model_dir, seed=5, columns=140)
    models = {"model": str(padded_teacher_dir), "teacher": str(wide)}
    record = first(distill(**WHOLE, **models, top_k=top_k))
    assert record["kd/divergence"] == pytest.approx(by_hand(options(**models))[1], rel=1e-6)


def rename_tokens(source: Path, target: Path, **names: str) -> Path:
    """A copy of a model whose tokenizer calls some tokens otherwise; two may be exchanged."""
    shutil.copytree(source, target)
    file = target / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {names.get(token, token): index for token, index in vocab.items()}
    file.write_text(json.dumps(content), encoding="utf-8")
    return target


def test_another_token_map_is_refused(distill: Callable[..., Any], teacher_dir: Path, tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """V1: though both have 102 tokens; the first id that differs is named, before any model is loaded."""
    other = rename_tokens(teacher_dir, tmp_path / "other", k="q", q="k", x="z", z="x")
    index = build_tokenizer().get_vocab()["k"]
    monkeypatch.setattr(load, "load_model", lambda *args, **kwargs: pytest.fail("a model was loaded"))
    for method in ("kd", "dpo", "kto"):
        with pytest.raises(ModelError, match=f"token id {index} is 'q' in the teacher but 'k' in the student"):
            distill(method, teacher=str(other))
    assert not list(tmp_path.glob("run*"))


def test_a_teacher_with_too_few_rows_is_refused(distill: Callable[..., Any], tiny_model_dir: Path,
                                                tmp_path: Path) -> None:
    """V1: a head that lacks some of the tokenizer's tokens."""
    small = make_model(tmp_path / "small", tiny_model_dir, seed=3, columns=20)
    with pytest.raises(ModelError, match="output head of student or teacher has only"):
        distill(teacher=str(small))


@pytest.mark.parametrize(("method", "changes", "sentence"), [
    ("kd", {"top_k": VOCABULARY}, "--top-k 102 must be less than the vocabulary size, 102 tokens"),
    ("dpo", {"teacher": None, "kd_weight": 0.5}, "--kd-weight has no effect without --teacher"),
    ("kto", {"teacher": None, "top_k": 4}, "--top-k has no effect without --teacher"),
    ("dpo", {"teacher": None, "temperature": 2.0}, "--temperature has no effect without --teacher"),
    ("kto", {"teacher": None, "divergence": "js"}, "--divergence has no effect without --teacher"),
    ("dpo", {"teacher": None, "temperature_scaling": True}, "--temperature-scaling has no effect without --teacher"),
    ("kd", {"divergence_mix": 0.2}, "--divergence-mix has no effect on --divergence forward_kl"),
    ("kd", {"divergence_mix": 0.2, "divergence": "tvd"}, "--divergence-mix has no effect on --divergence tvd"),
])
def test_refused(distill: Callable[..., Any], method: str, changes: dict[str, Any], sentence: str) -> None:
    """L3: options that would do nothing, or cannot be, with their names."""
    with pytest.raises((UsageError, ValidationError), match=sentence):
        distill(method, **changes)


def test_a_teacher_of_nan_is_refused(distill: Callable[..., Any], teacher_dir: Path, tmp_path: Path) -> None:
    """N1: before training, live or stored."""
    broken = tmp_path / "broken"
    shutil.copytree(teacher_dir, broken)
    model = AutoModelForCausalLM.from_pretrained(broken)
    model.model.norm.weight.data[0] = torch.nan
    model.save_pretrained(broken)
    for top_k in (None, 4):
        with pytest.raises(ModelError, match="nan"):
            distill(teacher=str(broken), top_k=top_k)


def test_a_run_repeats_itself(distill: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R4: `tropism train RUN/config.yaml` has the teacher and every choice of it."""
    once = distill(top_k=4, temperature=2.0, divergence="skew", divergence_mix=0.2)
    again = tmp_path / "again"
    assert main(["train", str(once.directory / "config.yaml"), "--output", str(again)]) == 0, capsys.readouterr().err
    assert distance(weights(again / "model"), weights(once.model)) == 0.0


# --- layouts and ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top_k", [None, 4])
def test_layouts_and_packs_agree(distill: Callable[..., Any], tiny_model_dir: Path, top_k: int | None) -> None:
    """P1, L1: a student in the padded layout beside a teacher in the tree layout, and packs of one tree."""
    how = {"method": "dpo", "precision": "fp64", "export_dtype": "float64", "max_steps": 2, "top_k": top_k}
    base = distill(**how)
    traveled = distance(weights(base.model), weights(tiny_model_dir))
    for changes, bound in (({"layout": "padded"}, 1e-5), ({"microbatch_tokens": 16}, 1e-8)):
        other = distill(**how, **changes)
        assert_same_metrics(records(other), records(base), bound, bound)
        assert distance(weights(other.model), weights(base.model)) < bound * traveled
