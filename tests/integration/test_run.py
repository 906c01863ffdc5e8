"""What a run leaves behind, and that it can be repeated."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from integration.conftest import assert_same_metrics, records, weights
from tropism.cli.app import main
from tropism.errors import NonFiniteError, OutputError, ReferenceMismatchError, TropismError
from tropism.observe.metrics import METRICS


def test_the_run_directory(train: Callable[..., Any], tiny_model_dir: Path) -> None:
    """Every file of the contract; each metric is in the table, with its unit."""
    result = train("kto", eval_fraction=0.2, samples=2, max_steps=6, eval_every=2)
    assert {path.name for path in result.directory.iterdir()} == {
        "config.yaml", "manifest.json", "audit.json", "metrics.jsonl", "samples.jsonl", "eval_rows.jsonl",
        "moved.jsonl", "scores.parquet", "model"}
    lines = records(result)
    assert [(line["step"], line["split"]) for line in lines] == [
        (0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (3, "train"), (4, "train"), (4, "eval"), (5, "train"),
        (6, "train"), (6, "eval")]
    for line in lines:
        assert line.keys() - {"step", "split"} <= METRICS.keys()
        assert all(math.isfinite(value) for value in line.values() if not isinstance(value, str))
    samples = [json.loads(line) for line in (result.directory / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 2
    assert all(sample["held_out"] and sample["prompt"] for sample in samples)
    manifest = json.loads((result.directory / "manifest.json").read_text())
    assert manifest["status"] == "done"
    assert manifest["steps"] == 6
    assert {"data", "eval_data", "tokenizer", "template"} <= manifest["fingerprints"].keys()
    assert {"torch", "transformers", "tropism"} <= manifest["libraries"].keys()
    audit = json.loads((result.directory / "audit.json").read_text())
    assert audit["rows"]["kept"] == 43
    assert audit["labels"]["desirable"] + audit["labels"]["undesirable"] == 43
    assert audit["split"]["train"] + audit["split"]["eval"] == 43


def test_before_step_1_policy_and_reference_agree(train: Callable[..., Any]) -> None:
    """R1, K5: margins 0 and the known loss, in training and evaluation; AUC and accuracy are one half."""
    for method, loss in (("kto", 0.5), ("dpo", math.log(2))):
        start, first, *_ = records(train(method, eval_fraction=0.2, max_steps=1))
        for record in (start, first):
            assert record["loss"] == pytest.approx(loss, abs=1e-6)
            assert record.get("rewards/margins", 0.0) == pytest.approx(0.0, abs=1e-4)
        key = "rewards/auc" if method == "kto" else "rewards/accuracies"
        assert start.get(key, 0.5) == 0.5
        assert first.get("rewards/accuracies", 0.5) == 0.5
        assert {"baselines/logps", "baselines/logps_per_token", "baselines/length"} <= start.keys()


def test_the_result_loads_with_plain_transformers(train: Callable[..., Any]) -> None:
    """S1: same logits, tokenizer and template; a tied head stays tied; dtype on disk = asked = config."""
    from tropism.model import save

    kept: dict[str, torch.Tensor] = {}
    ids = torch.randint(5, 102, (1, 24), generator=torch.Generator().manual_seed(0))
    real = save.export

    def watched(model: Any, *args: Any) -> None:
        with torch.no_grad():
            model.set_attn_implementation("sdpa")
            kept["logits"] = model(ids).logits
        real(model, *args)

    patch = pytest.MonkeyPatch()
    patch.setattr(save, "export", watched)
    try:
        result = train("kto", max_steps=3)
    finally:
        patch.undo()
    model = AutoModelForCausalLM.from_pretrained(result.model)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, kept["logits"], atol=1e-5)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in weights(result.model)
    assert json.loads((result.model / "config.json").read_text())["dtype"] == "float32"
    tokenizer = AutoTokenizer.from_pretrained(result.model)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text.startswith("<|bos|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generate(ids, max_new_tokens=2, pad_token_id=2).shape[1] > 24


def test_export_in_bfloat16_says_what_survives(train: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """S1: the file's dtype and the config's are the one asked for; updates lost to rounding are told of."""
    result = train("dpo", max_steps=2, learning_rate=1e-6, export_dtype="bfloat16")
    from safetensors import safe_open

    with safe_open(result.model / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert json.loads((result.model / "config.json").read_text())["dtype"] == "bfloat16"
    assert "of the changed weights" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_config_yaml_repeats_the_run(train: Callable[..., Any], tmp_path: Path, method: str) -> None:
    """Same weights and metrics, bit for bit, from RUN/config.yaml alone; another seed gives others."""
    result = train(method, eval_fraction=0.2, max_steps=8)
    config = str(result.directory / "config.yaml")
    assert main(["train", config]) == 2  # the run itself is not overwritten
    assert main(["train", config, "--output", str(tmp_path / "again")]) == 0
    one, two = weights(result.model), weights(tmp_path / "again" / "model")
    assert all(torch.equal(one[name], two[name]) for name in one)

    class Again:
        directory = tmp_path / "again"

    assert_same_metrics(records(Again), records(result), 0.0, 0.0)
    before, after = (yaml.safe_load((path / "config.yaml").read_text()) for path in (result.directory, Again.directory))
    assert {**before, "output": ""} == {**after, "output": ""}
    assert main(["train", config, "--output", str(tmp_path / "other"), "--seed", "1"]) == 0
    assert not all(torch.equal(one[name], other) for name, other in weights(tmp_path / "other" / "model").items())


def test_evaluation_of_the_training_rows_agrees_with_the_step(train: Callable[..., Any], data_of: dict[str, Path],
                                                              ) -> None:
    """L5: the loss of a step before its update is the evaluation of the same rows (KTO: one step, in file order)."""
    for method in ("kto", "dpo"):
        result = train(method, eval_data=str(data_of[method]), batch_size=43, max_steps=2, shuffle=False,
                       precision="fp64", eval_every=1, learning_rate=0.05, optimizer="sgd")
        lines = records(result)
        evaluations = [line for line in lines if line["split"] == "eval"]
        for step, evaluation in zip([line for line in lines if line["split"] == "train"], evaluations, strict=False):
            for key in ("loss", "kl/raw", "rewards/margins", "logps/chosen", "logps/rejected"):
                if key in step:
                    assert step[key] == pytest.approx(evaluation[key], rel=1e-9, abs=1e-12), (method, key)
        assert evaluations[0]["loss"] != evaluations[1]["loss"]


def test_held_out_prompts_are_not_trained_on(train: Callable[..., Any]) -> None:
    """No prompt is on both sides, whatever seed and order."""
    audits = [json.loads((train("kto", eval_fraction=0.3, max_steps=1, seed=seed).directory / "audit.json").read_text())
              for seed in (0, 1)]
    assert audits[0]["split"] == audits[1]["split"]


def test_sgd_max_grad_norm_and_weight_decay_change_the_result(train: Callable[..., Any]) -> None:
    """L3: options that should matter do."""
    plain = weights(train("dpo", max_steps=3).model)
    for changes in ({"optimizer": "sgd"}, {"max_grad_norm": 1e-3, "optimizer": "sgd", "learning_rate": 1.0},
                    {"weight_decay": 0.5}, {"beta": 0.5}, {"label_smoothing": 0.2}, {"warmup_ratio": 1.0},
                    {"schedule": "constant"}, {"group_prompts": True}, {"shuffle": False}, {"max_length": 24},
                    {"batch_size": 4}):
        other = weights(train("dpo", **{"max_steps": 3, **changes}).model)
        assert any(not torch.equal(plain[name], other[name]) for name in plain), changes
    plain = weights(train("kto", max_steps=2).model)
    for changes in ({"desirable_weight": 2.0}, {"undesirable_weight": 2.0}, {"undesirable_weight": "auto"}):
        other = weights(train("kto", **{"max_steps": 2, **changes}).model)
        assert any(not torch.equal(plain[name], other[name]) for name in plain), changes


def test_log_every_pools_the_window(train: Callable[..., Any]) -> None:
    """A record covers the steps since the last one: sum of sums over sum of counts."""
    single = [line for line in records(train("dpo", max_steps=6, precision="fp64")) if line["split"] == "train"]
    pooled = [line for line in records(train("dpo", max_steps=6, precision="fp64", log_every=4))
              if line["split"] == "train"]
    assert [line["step"] for line in pooled] == [4, 6]
    counts = [after - before for before, after in zip([0, *(line["examples"] for line in single)],
                                                      [line["examples"] for line in single], strict=False)]
    for window, line in ((slice(0, 4), pooled[0]), (slice(4, 6), pooled[1])):
        mean = sum(n * one["loss"] for n, one in zip(counts[window], single[window], strict=True)) / sum(counts[window])
        assert line["loss"] == pytest.approx(mean, rel=1e-12)


def test_a_non_finite_loss_stops_the_run_and_names_the_row(train: Callable[..., Any],
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """N1: the bad update is not applied; the row and its line are in the message."""
    from tropism.losses import pairwise
    from tropism.methods import LOSSES

    calls = 0
    before: list[torch.Tensor] = []

    def poisoned(chosen: Any, rejected: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        losses = pairwise.sigmoid(chosen, rejected, **options)
        third_step = calls == 4  # the first call is that of the check before step 1
        return losses * torch.where(torch.arange(len(losses)) == 1, float("nan"), 1.0) if third_step else losses

    import tropism.train.loop as loop

    real = loop.train_step
    models: list[Any] = []

    def watched(engine: Any, *args: Any) -> Any:
        models.append(engine.model.module)
        before.append(next(engine.model.module.parameters()).detach().clone())
        return real(engine, *args)

    monkeypatch.setattr(loop, "train_step", watched)
    paired = LOSSES["paired"]
    monkeypatch.setitem(paired, "sigmoid", replace(paired["sigmoid"], function=poisoned))
    with pytest.raises(NonFiniteError, match=r"step 3: the loss of 1 row is not finite: pairs\.jsonl:\d+"):
        train("dpo", max_steps=5, microbatch_tokens=8192)
    assert torch.equal(next(models[-1].parameters()), before[-1])
    assert torch.isfinite(before[-1]).all()


def test_an_infinite_log_prob_behind_a_saturated_loss_stops_the_run(train: Callable[..., Any],
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """N1: KTO's loss of a log-ratio of infinity is finite, and its gradient is 0."""
    from tropism.train.frozen.reference import StoredReference

    real, calls = StoredReference.score, 0

    def poisoned(self: Any, trees: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        scores = real(self, trees, batch)
        if calls == 4:  # start-up check, step 1 with its mismatched completions, step 2
            scores[0] = float("-inf")
        return scores

    monkeypatch.setattr(StoredReference, "score", poisoned)
    with pytest.raises(NonFiniteError, match=r"step 2: the loss of \d rows? is not finite: feedback\.jsonl:\d+"):
        train("kto", max_steps=5, microbatch_tokens=8192)


def test_a_wrong_reference_is_noticed(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    """R1: an error before step 1, and a warning under --allow-reference-mismatch."""
    from tropism.train.frozen.reference import StoredReference

    real = StoredReference.score
    monkeypatch.setattr(StoredReference, "score", lambda self, trees, batch: real(self, trees, batch) + 0.041)
    with pytest.raises(ReferenceMismatchError, match=r"mean \|log-ratio\| 0\.041.*--allow-reference-mismatch"):
        train("dpo", max_steps=1)
    train("dpo", max_steps=1, allow_reference_mismatch=True)
    assert "mean |log-ratio| 0.041" in capsys.readouterr().out


def test_another_model_as_the_reference(train: Callable[..., Any], tiny_model_dir: Path, tmp_path: Path) -> None:
    """R2: `reference: PATH` anchors to that model; with the policy's own weights it changes nothing."""
    default = records(train("dpo", max_steps=3))
    assert_same_metrics(records(train("dpo", max_steps=3, reference=str(tiny_model_dir))), default, 1e-6, 1e-6)
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(1.5)
    model.save_pretrained(other)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(other)
    assert records(train("dpo", max_steps=3, reference=str(other)))[0]["loss"] != pytest.approx(math.log(2), abs=1e-4)


def test_messages_and_other_file_kinds(train: Callable[..., Any], tmp_path: Path, feedback: Path) -> None:
    """The same rows as messages in JSON, Parquet and CSV train alike."""
    import csv

    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in feedback.read_text().splitlines()]
    chat = [{"messages": [{"role": "user", "content": row["prompt"]},
                          {"role": "assistant", "content": row["completion"]}], "label": row["label"]} for row in rows]
    (tmp_path / "rows.json").write_text(json.dumps(chat))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chat), tmp_path / "rows.parquet")
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion", "label"])
        writer.writeheader()
        writer.writerows({key: json.dumps(value) if key != "label" else str(value).lower() for key, value in (
            ("prompt", line["messages"][:1]), ("completion", line["messages"][1:]), ("label", line["label"]))}
                         for line in chat)
    metrics = [records(train("kto", data=str(tmp_path / f"rows.{kind}"), max_steps=2)) for kind in
               ("json", "parquet", "csv")]
    assert_same_metrics(metrics[1], metrics[0], 0.0, 0.0)
    assert_same_metrics(metrics[2], metrics[0], 0.0, 0.0)


def test_a_full_disk_at_the_end_leaves_no_half_model(train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch,
                                                     tmp_path: Path) -> None:
    """S1: the model directory is there whole or not at all; the message says where and why."""
    from tropism.model import save

    def full(*args: Any) -> None:
        (tmp_path / "run1" / ".model.partial" / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "write_model", full)
    with pytest.raises(OutputError, match="the model could not be written"):
        train("dpo", max_steps=1)
    assert not (tmp_path / "run1" / "model").exists()
    assert json.loads((tmp_path / "run1" / "manifest.json").read_text())["status"] == "failed"


def test_a_disk_too_small_for_the_result_is_noticed_before_training(train: Callable[..., Any],
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(OutputError, match=r"disk space for the model: [\d,]+ bytes are needed, 1,000 are free"):
        train("dpo", max_steps=1)


def test_prompts_without_room_for_an_answer_are_not_sampled(train: Callable[..., Any], tmp_path: Path) -> None:
    """Generation must not run past the model's positions."""
    data = tmp_path / "long.jsonl"
    rows = [{"prompt": prompt, "chosen": " a", "rejected": " b"} for prompt in ("oak " * 120, "elm " * 120, "fir")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = train("dpo", data=str(data), max_steps=1, samples=3).samples
    assert [sample["prompt"] for sample in samples] == ["fir"]


def test_the_notice_of_large_trees_looks_at_steps(train: Callable[..., Any], tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    """All answers to a prompt together may exceed a pack that no step's do."""
    data = tmp_path / "many.jsonl"
    rows = [{"prompt": f"oak {i % 2} ", "chosen": f"elm {i}", "rejected": f"ash {i}"} for i in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train("dpo", data=str(data), max_steps=2, batch_size=2, microbatch_tokens=64)
    assert "gets a pack of its own" not in capsys.readouterr().out
    train("dpo", data=str(data), max_steps=2, batch_size=40, microbatch_tokens=64)
    assert "is too small for 2 prompts with completions" in capsys.readouterr().out


def test_a_policy_of_nans_does_not_agree_with_its_reference(train: Callable[..., Any], tiny_model_dir: Path,
                                                            tmp_path: Path) -> None:
    """R1: NaN compares with nothing, and is no agreement."""
    broken = tmp_path / "broken"
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
    model.save_pretrained(broken)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(broken)
    with pytest.raises(TropismError):
        train("dpo", model=str(broken), max_steps=1, reference="live", strict=True)


def test_a_weight_without_a_gradient_is_updated_alike_on_any_number_of_ranks() -> None:
    """L1: an optimizer skips a missing gradient, but not one of zeros."""
    from tropism.distributed import World

    parameter = torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    World(0, 1, torch.device("cpu")).sum_gradients([parameter, frozen])
    assert parameter.grad is not None
    assert not parameter.grad.any()
    assert frozen.grad is None


@pytest.mark.parametrize("method", ["kto", "dpo"])
def test_bfloat16_on_a_cpu(train: Callable[..., Any], method: str) -> None:
    """N3: bfloat16 compute on float32 weights: known first values, and the written precision is the one used."""
    result = train(method, precision="bf16", eval_fraction=0.2, max_steps=3)
    assert result.before["loss"] == pytest.approx({"kto": 0.5, "dpo": math.log(2)}[method], abs=0.02)
    assert result.before.get("rewards/auc", result.before.get("rewards/accuracies", 0.5)) == 0.5
    assert yaml.safe_load((result.directory / "config.yaml").read_text())["precision"] == "bf16"
    assert yaml.safe_load((train(method, max_steps=1).directory / "config.yaml").read_text())["precision"] == "fp32"
