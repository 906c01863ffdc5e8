"""What sharded models are filled with, and what goes wrong on one process alone."""

import gc
import json
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Glm4MoeConfig

from processes import run_ranks
from tropism.config import METHODS
from tropism.errors import ModelError, TropismError


def ranks(target: Any, tmp_path: Path, *arguments: Any) -> list[Any]:
    assert run_ranks(2, target, str(tmp_path), *arguments) == [0, 0]
    return [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(2)]


def join(rank: int, size: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)


def say(folder: str, rank: int, found: Any) -> None:
    (Path(folder) / f"found-{rank}.json").write_text(json.dumps(found))


def _load(rank: int, size: int, port: int, folder: str, models: list[str]) -> None:
    """How far each model is from what one process loads, or the error."""
    join(rank, size, port)
    from tropism.distributed import connect
    from tropism.distributed.shard import Sharding, gathered, shard_sizes
    from tropism.model.bf16_weights import round_to_bf16
    from tropism.model.fingerprint import weight_hashes
    from tropism.model.load import load_model
    from tropism.model.load_sharded import load_sharded
    from tropism.model.source import ModelSource

    found: list[Any] = []
    with connect() as plain:
        world = plain.spread(1, size, 1)
        assert world.mesh is not None
        for name in models:
            try:
                module = load_sharded(ModelSource.of(name), "fp32", world, Sharding(world.mesh))
            except ModelError as error:
                found.append(str(error))
                continue
            ours = gathered(module.state_dict(), torch.float32, True)
            theirs = load_model(ModelSource.of(name), "fp32", torch.device("cpu")).state_dict()
            assert ours.keys() == theirs.keys()
            tied = module.get_input_embeddings().weight is module.get_output_embeddings().weight
            found.append([max(float((ours[key] - theirs[key]).abs().max()) for key in ours), tied])
        frozen = load_sharded(ModelSource.of(models[0]), "bf16", world, Sharding(world.mesh, torch.bfloat16))
        before = weight_hashes(frozen.requires_grad_(False))
        round_to_bf16(frozen)
        found.append([before == weight_hashes(frozen), shard_sizes(frozen)[-1]])
    say(folder, rank, found)


def test_what_one_process_loads(tiny_model_dir: Path, fixture_tokenizer: Any, tmp_path: Path) -> None:
    """S1, X2: stored buffers (a router's bias) and experts that are filed one by one; tied names that differ, and a
    damaged file, are an error of every process. Frozen matrices are held in two bytes, and count as what they were."""
    torch.manual_seed(3)
    glm = AutoModelForCausalLM.from_config(Glm4MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1, n_shared_experts=1, n_group=1, topk_group=1))
    buffers = dict(glm.named_buffers())
    biases = [name for name in buffers if "e_score_correction_bias" in name and name in glm.state_dict()]
    assert biases
    for name in biases:
        buffers[name].copy_(torch.randn(4))
    glm.save_pretrained(tmp_path / "glm")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path / "pieces", max_shard_size=8000)
    for name in ("differ", "damaged", "nan"):
        model.save_pretrained(tmp_path / name)
    file = tmp_path / "differ" / "model.safetensors"
    state = load_file(file)
    save_file({**state, "model.embed_tokens.weight": state["lm_head.weight"] * 2
               if "lm_head.weight" in state else state["model.embed_tokens.weight"],
               "lm_head.weight": state.get("lm_head.weight", state["model.embed_tokens.weight"] * 2)}, file)
    config = tmp_path / "differ" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    damaged = tmp_path / "damaged" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4000])
    file = tmp_path / "nan" / "model.safetensors"
    state = load_file(file)
    state["model.layers.1.mlp.up_proj.weight"][-1, :2] = torch.nan  # a row of the second process
    save_file(state, file, metadata={"format": "pt"})
    linear = sum(layer.weight.numel() for layer in model.model.modules() if isinstance(layer, torch.nn.Linear))
    wide = 4 * sum(weight.numel() for weight in model.parameters()) - 2 * linear
    vectors = 4 * sum(weight.numel() for weight in model.parameters() if weight.dim() < 2)  # which each process holds
    places = [str(tmp_path / name) for name in ("glm", "pieces", "differ", "damaged", "nan")]
    for found in ranks(_load, tmp_path, [str(tiny_model_dir), *places]):
        assert found[0][0] == found[1][0] == found[2][0] == 0.0
        assert "lm_head.weight" in found[3]
        assert "tie_word_embeddings" in found[3]
        assert str(damaged) in found[4] or "damaged" in found[4]
        assert "2 of the" in found[5]
        assert "model.layers.1.mlp.up_proj.weight are NaN or infinite" in found[5]
        assert found[6] == [True, (wide + vectors) // 2]


def _run(rank: int, size: int, port: int, folder: str, what: str, method: str, settings: dict[str, Any]) -> None:
    """A run in which something is odd on one process; what is raised."""
    join(rank, size, port)
    from tropism.distributed import connect
    from tropism.distributed import training_state as state
    from tropism.observe.console import Voice
    from tropism.runner import Run
    from tropism.train.setup import models

    alive: list[Any] = []
    if what == "disk" and rank == 1:
        original = state.dcp.FileSystemWriter
        state.dcp.FileSystemWriter = lambda path, **named: original(Path(folder) / "elsewhere", **named)  # type: ignore
        (Path(folder) / "elsewhere").mkdir()
    if what == "freed":
        frozen = models.Numerics.frozen

        def kept(self: Any, *arguments: Any) -> Any:
            model = frozen(self, *arguments)
            alive.append(weakref.ref(model.module))
            return model

        models.Numerics.frozen = kept  # type: ignore[method-assign]
    raised: Any = ""
    with connect() as world:
        try:
            one = Run(METHODS[method](**settings), world, Voice(loud=False))
            gc.disable()
            if what == "freed":
                one.build()
                raised = [reference() is None for reference in alive]
            else:
                one.fit()
        except TropismError as error:
            raised = f"{type(error).__name__}: {error}"
    say(folder, rank, raised)


@pytest.fixture
def settings(tiny_model_dir: Path, pairs: Path, tmp_path: Path) -> dict[str, Any]:
    return {"model": str(tiny_model_dir), "data": str(pairs), "output": str(tmp_path / "run"), "samples": 0,
            "store": str(tmp_path / "store"), "batch_size": 8, "max_steps": 2, "parallel": {"shard": "on"}}


def test_a_disk_that_not_all_processes_see(settings: dict[str, Any], tmp_path: Path) -> None:
    """C2: a checkpoint with parts elsewhere is none."""
    for found in ranks(_run, tmp_path, "disk", "dpo", {**settings, "save_every": 1}):
        assert "a disk that all machines share. About" in found
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*/COMPLETE"))


def test_a_frozen_model_that_was_scored_is_not_kept(settings: dict[str, Any], tiny_model_dir: Path, tmp_path: Path,
                                                   ) -> None:
    """O1, R4: without waiting for a collection of garbage."""
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    module.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "other")
    assert ranks(_run, tmp_path, "freed", "dpo", {**settings, "reference": str(tmp_path / "other")}) == [[True]] * 2


@pytest.mark.parametrize("parallel", [{"shard": "on"}, {"tensor": 2}], ids=["shard", "tensor"])
def test_a_first_step_that_changes_nothing(settings: dict[str, Any], tmp_path: Path, parallel: dict[str, Any]) -> None:
    """N4: found by all, though each looks at its own part; also after answers were made."""
    settings |= {"optimizer": "sgd", "learning_rate": 1e-60, "samples": 1, "parallel": parallel}
    assert [found.partition(":")[0] for found in ranks(_run, tmp_path, "", "dpo", settings)] == [
        "NothingLearnedError"] * 2
