"""Runs with 8-bit moments: stopped and resumed, on two processes, and with adapters."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from integration.conftest import distance, weights
from integration.resuming import during, lines, stop_after  # noqa: F401
from processes import one_rank, run_ranks
from tropism.config import METHODS
from tropism.distributed.training_state import read_model
from tropism.errors import StoppedEarly
from tropism.runner import run
from tropism.train.checkpoints.saver import Saver

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes")

ONE_CODE = 0.02
"""Two processes add gradients in another order. A moment at the border between two codes then takes the other one,
which differs by up to 2%, so weights differ by that share of the distance that they traveled at most."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A random model whose matrices are large enough for 8-bit moments."""
    path, tokenizer = tmp_path_factory.mktemp("models") / "wide", AutoTokenizer.from_pretrained(tiny_model_dir)
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True)).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def settings(model: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    store = tmp_path_factory.mktemp("store")
    return lambda output, **changes: {
        "model": str(model), "data": str(pairs), "output": str(output), "store": str(store), "batch_size": 8,
        "max_steps": 6, "learning_rate": 1e-3, "samples": 1, "optimizer": "adamw8bit", **changes}


@pytest.mark.parametrize("lora", [{}, {"rank": 64, "dora": True, "modules_to_save": "embed_tokens"}],
                         ids=["full", "dora"])
def test_a_stopped_run_equals_the_straight_one(settings: Any, stop_after: Any, during: Any,  # noqa: F811
                                               tmp_path: Path, lora: dict[str, Any],
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit. The checkpoint is as large as the disk check says."""
    sizes: list[tuple[int, int]] = []
    save = Saver._write

    def measured(self: Saver, step: int, tensors: dict[str, torch.Tensor], *args: Any) -> None:
        sizes.append((self.estimate_bytes(), sum(tensor.nbytes for tensor in tensors.values())))
        assert any(tensor.dtype == torch.uint8 for tensor in tensors.values())
        save(self, step, tensors, *args)

    monkeypatch.setattr(Saver, "_write", measured)
    changes = {"lora": lora} if lora else {}
    straight = run(METHODS["dpo"](**settings(tmp_path / "straight", save_every=6, **changes)))
    stop_after(3)
    with pytest.raises(StoppedEarly):
        run(METHODS["dpo"](**settings(tmp_path / "stopped", **changes)))
    during()
    resumed = run(METHODS["dpo"](**settings(tmp_path / "stopped", resume="auto", **changes)))
    one, other = (load_file(next(done.model.glob("*.safetensors"))) for done in (resumed, straight))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert lines(resumed.directory) == lines(straight.directory)
    assert all(real <= said <= 1.5 * real + 2**20 for said, real in sizes)


def test_two_processes_equal_one(settings: Any, model: Path, tmp_path: Path) -> None:
    """Sharded and as copies; and one process resumes what two wrote."""
    base = run(METHODS["dpo"](**settings(tmp_path / "one")))
    jobs = [("dpo", settings(tmp_path / name, parallel=parallel, save_every=6)) for name, parallel in (
        ("shards", {"shard": 2}), ("copies", {"shard": 1}))]
    assert run_ranks(2, one_rank, jobs) == [0, 0]
    expected = weights(base.model)
    traveled = distance(expected, weights(model))
    for name in ("shards", "copies"):
        gap = distance(weights(tmp_path / name / "model"), expected) / traveled
        print(f"{name}: {gap:.1e} of the distance traveled")
        assert gap < ONE_CODE
    state = tmp_path / "shards" / "checkpoints" / "step-00000006" / "state"
    assert read_model(state).keys() >= {"model.embed_tokens.weight"}
    more = settings(tmp_path / "shards", resume="auto", max_steps=8)
    assert run(METHODS["dpo"](**more)).steps == 8
    assert lines(tmp_path / "shards")[-1]["step"] == 8
