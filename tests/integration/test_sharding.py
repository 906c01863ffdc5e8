"""A model that is spread over processes gives the weights and metrics of one process, however it is spread."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from integration.conftest import assert_same_metrics, distance, records, weights
from integration.test_invariance import BOUNDS, Left
from processes import fork_server, one_rank, run_ranks
from tropism.cli.app import main
from tropism.config import METHODS
from tropism.runner import run

Settings = dict[str, Any]
TENSOR: dict[str, Settings] = {"tensor": {"tensor": 2}}
FOUR: dict[str, Settings] = {
    "shard": {"shard": "on"}, "replicas": {"replicate": 2, "reduce_once": True}, "shard and tensor": {"tensor": 2},
    "replicas of tensor": {"replicate": 2, "shard": 1, "tensor": 2}}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """The tiny model with other weights."""
    path = tmp_path_factory.mktemp("models") / "other"
    return changed(tiny_model_dir, path)


def changed(model: Path, path: Path) -> Path:
    """A model with other weights, as a teacher."""
    module = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.2)
    module.save_pretrained(path)
    AutoTokenizer.from_pretrained(model).save_pretrained(path)
    return path


def compare(model: Path, base: Path, found: Path, precision: str) -> None:
    """Weights, relative to the distance traveled, and every metric."""
    expected = weights(base / "model")
    start: dict[str, Any] = {}
    for file in model.glob("*.safetensors"):
        start |= {name: tensor.double() for name, tensor in load_file(file).items()}
    traveled = distance(expected, start)
    assert traveled > 1e-3
    gap = distance(weights(found / "model"), expected) / traveled
    print(f"{found.parent.name}/{found.name} ({precision}): {gap:.1e} of the distance traveled")
    assert gap < BOUNDS[precision][0], found
    assert_same_metrics(records(Left(found)), records(Left(base)), *BOUNDS[precision][1:])


@contextmanager
def whole_norms() -> Iterator[None]:
    """Norms in the dtype of what they are given. Those of transformers go through float32 in float64 too: where another
    order of additions in float64 crosses a boundary of that rounding, results are 1e-8 apart."""
    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))

    kinds = (LlamaRMSNorm, Qwen3RMSNorm)
    before = [kind.forward for kind in kinds]
    for kind in kinds:
        kind.forward = forward
    try:
        yield
    finally:
        for kind, original in zip(kinds, before, strict=True):
            kind.forward = original


def exact_rank(rank: int, size: int, port: int, jobs: Sequence[tuple[str, Settings]]) -> None:
    with whole_norms():
        one_rank(rank, size, port, jobs)


def spread(folder: Path, size: int, ways: dict[str, Settings], runs: Sequence[tuple[str, Settings]]) -> None:
    """Every run in one process, and spread in each way."""
    jobs = []
    for number, (method, options) in enumerate(runs):
        with whole_norms():
            run(METHODS[method](**options, output=str(folder / f"{number}-base")))
        for way, parallel in ways.items():
            store = {} if method == "sft" else {"store": str(folder / f"store of {way}")}
            jobs.append((method, {**options, **store, "output": str(folder / f"{number}-{way}"), "parallel": parallel,
                                  "microbatch_tokens": 2 * options.get("max_length", 100)}))
    assert run_ranks(size, exact_rank, jobs, limit_s=max(240, 60 * len(jobs))) == [0] * size
    for number, (_, options) in enumerate(runs):
        for way in ways:
            compare(Path(options["model"]), folder / f"{number}-base", folder / f"{number}-{way}", options["precision"])


def made(folder: Path, model: Path, other: Path, data_of: dict[str, Path],
         **changes: Any) -> list[tuple[str, Settings]]:
    """KTO, DPO, SFT and KD on made rows, with a short step at the end of each epoch."""
    texts = folder / "texts.jsonl"
    rows = map(json.loads, data_of["kto"].read_text().splitlines())
    texts.write_text("".join(json.dumps({key: row[key] for key in ("prompt", "completion")}) + "\n" for row in rows))
    common = {"model": str(model), "batch_size": 8, "learning_rate": 1e-3, "export_dtype": "float64",
              "eval_fraction": 0.2, "log_every": 2, "precision": "fp64", **changes}
    cases: dict[str, Settings] = {
        "kto": {"data": data_of["kto"]}, "dpo": {"data": data_of["dpo"]}, "sft": {"data": texts},
        "kd": {"data": texts, "teacher": other}}
    return [(method, {**common, "samples": int(method == "kto"), **{key: str(value) for key, value in case.items()},
                      **({} if method == "sft" else {"store": str(folder / "store")})})
            for method, case in cases.items()]


@pytest.mark.slow
def test_two_processes(tiny_model_dir: Path, other: Path, data_of: dict[str, Path], tmp_path: Path) -> None:
    """X1, X2, L1: layers that two processes compute together. (Two shards, and two copies: test_invariance.)"""
    kto, dpo, _, kd = made(tmp_path, tiny_model_dir, other, data_of, max_steps=4, batch_size=10, log_every=1)
    spread(tmp_path, 2, TENSOR, [kto, dpo, kd])


@pytest.mark.slow
def test_four_processes(tiny_model_dir: Path, other: Path, data_of: dict[str, Path], tmp_path: Path) -> None:
    """X1, X2, L1: four shards, replicas of two, and two of two axes with tensor parallel; 20 steps."""
    for precision in BOUNDS:
        folder = tmp_path / precision
        folder.mkdir()
        spread(folder, 4, FOUR, made(folder, tiny_model_dir, other, data_of, max_steps=20, precision=precision))


REAL = {"kto": "pandalm_human_kto", "dpo": "pandalm_human_pairs", "sft": "selfinstruct_human_sft",
        "kd": "selfinstruct_human_sft"}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("precision", "optimizer"), [("fp64", "sgd"), ("fp32", "adamw")])
def test_real_rows(test_data: Path, tmp_path: Path, size: int, precision: str, optimizer: str) -> None:
    """X1, L1: 20 steps of uneven lengths, the last of them short, on a model with grouped heads and a tied head.

    In float64 by SGD: AdamW's first steps are signs of gradients, and those of words that do not occur are rounding.
    """
    model = test_data / "models" / "stories260K"
    teacher = changed(model, tmp_path / "teacher")
    runs = []
    for method, name in REAL.items():
        rows = (test_data / "data" / f"{name}.jsonl").read_text().splitlines(keepends=True)[: 19 * 6 + 2]
        data = tmp_path / f"{method}.jsonl"
        data.write_text("".join(rows))
        runs.append((method, {
            "model": str(model), "data": str(data), "batch_size": 6, "max_steps": 20, "max_length": 256,
            "precision": precision, "optimizer": optimizer, "learning_rate": 1e-1 if optimizer == "sgd" else 1e-4,
            "export_dtype": "float64", "samples": 0, **({"teacher": str(teacher)} if method == "kd" else {}),
            **({} if method == "sft" else {"store": str(tmp_path / "store")})}))
    spread(tmp_path, size, {"shard": {"shard": "on"}} if size == 2 else {**FOUR}, runs)


@pytest.mark.slow
def test_other_families(fixture_tokenizer: Any, data_of: dict[str, Path], tmp_path: Path) -> None:
    """X2: norms of heads, whose gradients each process has for its own heads alone (Qwen3); a head of its own, and a
    model in several files with another size of its vocabulary (Llama); biases, and a plan that has the embedding too
    (GPT-NeoX)."""
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": len(fixture_tokenizer) + 3, "max_position_embeddings": 512}
    runs = []
    torch.manual_seed(7)
    for name, module in (("qwen3", AutoModelForCausalLM.from_config(Qwen3Config(
            **shape, head_dim=6, tie_word_embeddings=True))),
                         ("llama", LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False))),
                         ("neox", AutoModelForCausalLM.from_config(GPTNeoXConfig(**shape, rotary_pct=0.5)))):
        module.save_pretrained(tmp_path / name, max_shard_size=8000)
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 2
        fixture_tokenizer.save_pretrained(tmp_path / name)
        runs.append(("dpo", {"model": str(tmp_path / name), "data": str(data_of["dpo"]), "batch_size": 8,
                             "max_steps": 4, "learning_rate": 1e-3, "precision": "fp64", "export_dtype": "float64",
                             "samples": int(name == "llama"), "store": str(tmp_path / "store")}))
    spread(tmp_path, 2, {"shard": {"reduce_once": True}, "tensor": {"tensor": 2}}, runs)


@pytest.mark.some(2)
@pytest.mark.parametrize(("method", "changes"), [
    ("dpo", {}), ("dpo", {"lora": {"rank": 2}}), ("kd", {})], ids=["dpo", "adapter", "kd"])
def test_bfloat16_is_that_of_one_process(method: str, changes: Settings, tiny_model_dir: Path,
                                         other: Path, data_of: dict[str, Path], tmp_path: Path) -> None:
    """R4, R5: matrices travel in bfloat16 and norms do not, so that scores are equal, and may come from the store that
    one process filled. Frozen matrices are held in two bytes."""
    settings = dict(made(tmp_path, tiny_model_dir, other, data_of, max_steps=3, precision="bf16", log_every=1))[method]
    settings |= changes
    base, found = tmp_path / "base", tmp_path / "two"
    run(METHODS[method](**settings, output=str(base)))
    assert run_ranks(2, one_rank, [(method, {**settings, "output": str(found), "parallel": {"shard": "on"}})]) == [0, 0]
    ours, theirs = records(Left(found)), records(Left(base))
    assert ours[0] == theirs[0]  # the first evaluation
    for key in {"loss", "logps/chosen", "logps/rejected", "kd/divergence"} & theirs[1].keys():
        assert ours[1][key] == pytest.approx(theirs[1][key], rel=1e-12), key
    assert ours[1]["grad_norm"] == pytest.approx(theirs[1]["grad_norm"], rel=1e-2)
    if "lora" not in changes:
        moved = distance(weights(base / "model"), weights(tiny_model_dir))
        assert distance(weights(found / "model"), weights(base / "model")) / moved < 0.1
    prints = [json.loads((place / "manifest.json").read_text())["fingerprints"] for place in (base, found)]
    assert prints[0] == {**prints[1], "config": prints[0]["config"]}


def _resumed(size: int, settings: Settings, checkpoint: Path) -> None:
    settings = {**settings, "output": str(checkpoint.parents[1]), "resume": str(checkpoint),
                "parallel": {"shard": "on"}}
    if size == 1:
        run(METHODS["kto"](**settings))
    else:
        assert run_ranks(size, one_rank, [("kto", settings)]) == [0] * size


@pytest.mark.some(2)
@pytest.mark.parametrize(("before", "after"), [
    (2, 1), (1, 2), pytest.param(2, 4, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)])
def test_resume_on_other_processes(before: int, after: int, tiny_model_dir: Path, other: Path, tmp_path: Path,
                                   data_of: dict[str, Path]) -> None:
    """C2: what N processes saved M go on from; the steps that follow are those of the straight run."""
    method, settings = made(tmp_path, tiny_model_dir, other, data_of, max_steps=6, save_every=3, keep=0)[0]
    assert method == "kto"
    run(METHODS[method](**settings, output=str(tmp_path / "straight")))
    jobs = [(method, {**settings, "output": str(tmp_path / "run"), "parallel": {"shard": "on"}})]
    if before == 1:
        run(METHODS[method](**jobs[0][1]))
    else:
        assert run_ranks(before, one_rank, jobs) == [0] * before
    _resumed(after, settings, tmp_path / "run" / "checkpoints" / "step-00000003")
    compare(tiny_model_dir, tmp_path / "straight", tmp_path / "run", "fp64")
    sittings = json.loads((tmp_path / "run" / "manifest.json").read_text())["resumed"]
    assert [(sitting["step"], sitting["world_size"]) for sitting in sittings] == [(3, after)]


def wait_for(what: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def _rank_of_torchrun(folder: str, arguments: list[str]) -> None:
    """The command line, with its output and its process in files."""
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    out = os.open(f"{folder}/said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    if code := main(arguments):
        sys.exit(code)


def test_torchrun_goes_on_after_a_rank_was_killed(tiny_model_dir: Path, feedback: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """X1, C2: kill -9 of one of two; torchrun starts both again, and the run goes on from its last checkpoint.

    By torchrun's agent, as `--standalone --max-restarts 1` sets it up; its processes come from the fork server.
    """
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)  # the agent's own, which would stay
    arguments = ["kto", "--model", str(tiny_model_dir), "--data", str(feedback), "--batch-size", "8", "--samples", "0",
                 "--epochs", "8", "--save-every", "5", "--resume", "auto", "--store", str(tmp_path / "store"),
                 "--output", str(tmp_path / "run")]
    checkpoints = tmp_path / "run" / "checkpoints"

    def kill() -> None:
        wait_for(lambda: checkpoints.is_dir() and list(checkpoints.glob("step-*/COMPLETE")))
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)

    fork_server()
    killer = threading.Thread(target=kill)
    killer.start()
    elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="killed", rdzv_backend="c10d",
                                rdzv_endpoint="localhost:0", max_restarts=1, start_method="forkserver"),
                   _rank_of_torchrun)(str(tmp_path), arguments)
    killer.join()
    assert sum((tmp_path / f"said-{rank}").read_text().count("plan: ") for rank in range(2)) == 2
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["status"] == "done"
    assert manifest["resumed"][0]["step"] >= 5
    steps = [record["step"] for record in records(Left(tmp_path / "run")) if record["split"] == "train"]
    assert steps == list(range(1, manifest["steps"] + 1))
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_one_process_goes_on_with_a_run_of_tensor_parallel(tiny_model_dir: Path, feedback: Path, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    """C2: the recorded sizes that do not fit are left out, and said; given ones err."""
    output = str(tmp_path / "run")
    settings = {"model": str(tiny_model_dir), "data": str(feedback), "batch_size": 8, "samples": 0, "max_steps": 1,
                "save_every": 1, "store": str(tmp_path / "store"), "output": output,
                "parallel": {"tensor": 2, "replicate": 1}}
    assert run_ranks(2, one_rank, [("kto", settings)]) == [0, 0]
    capsys.readouterr()
    assert main(["resume", output, "--max-steps=2", "--parallel.tensor=2"]) == 2
    assert "does not equal the number of processes, 1" in capsys.readouterr().err
    assert main(["resume", output, "--max-steps=2"]) == 0
    said = capsys.readouterr()
    assert "config.yaml has parallel.tensor 2, which does not fit 1 process" in said.err
    assert "changed: --parallel.tensor (was 2, now 1)" in said.out


@pytest.mark.slow
def test_torchrun_does_not_begin_again_what_was_stopped(tiny_model_dir: Path, feedback: Path, tmp_path: Path) -> None:
    """C1, X1: --max-time under --max-restarts is one sitting, and each of its errors is said once by two ranks."""
    options = ["--model", str(tiny_model_dir), "--data", str(feedback), "--batch-size", "8", "--samples", "0",
               "--resume", "auto", "--store", str(tmp_path / "store"), "--output", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
         "-m", "tropism", "kto", *options, "--max-time", "1s"],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, timeout=150)
    assert done.returncode == 1
    assert done.stdout.count("plan: ") == 1
    assert done.stderr.count("tropism: stopped: --max-time is reached. There is no checkpoint yet, so a resumed run "
                             "starts at step 1 with the stored scores. Resume with: "
                             "torchrun --nproc-per-node 2 -m tropism resume") == 1, done.stderr
    assert done.stderr.count("the run has already stopped. torchrun restarted") == 1
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "stopped"
