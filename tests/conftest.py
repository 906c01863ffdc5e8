"""Fixtures that all tests share: the tiny tokenizer and model of the cases, and shape checks on the losses."""

import gc
import os
from pathlib import Path

# Before anybody imports torch: processes that tests start inherit this. Several of them share two cores, and threads
# that spin while they wait make each step many times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["TROPISM_NO_REPORT"] = "1"  # drawing takes longer than most runs of tests

import jaxtyping
import pytest
import torch
from hypothesis import settings

# Before anybody imports rich, which obeys what a terminal or a CI says of colors and widths: tests read its output
# as plain text, here and from the processes that they start.
for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
    os.environ.pop(name, None)

# Before tropism.losses is imported by anyone: from here on a wrong shape or dtype is an error, not a broadcast.
jaxtyping.install_import_hook("tropism.losses", "beartype.beartype")

from helpers import build_tokenizer, fixture_parts  # noqa: E402  (imports of tropism must come after the hook)

torch.set_num_threads(1)
os.getloadavg = lambda: (0.0, 0.0, 0.0)  # what else runs on the machine changes no output

# The suite tries the same examples every time; `--hypothesis-profile explore` looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", max_examples=2000, deadline=None, database=None)
settings.load_profile("same")


@pytest.fixture(scope="session")
def fixture_tokenizer():
    """The character tokenizer of `cases/00-fixture.yaml`, with its chat template. Do not change it in a test."""
    return build_tokenizer()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory, fixture_tokenizer) -> Path:
    """A directory with `model_random` of the cases and the fixture tokenizer, as `save_pretrained` writes them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    parts = fixture_parts()
    spec, ids = parts["model_random"], parts["ids"]
    config = LlamaConfig(
        vocab_size=parts["vocab_size"], hidden_size=spec["hidden"], intermediate_size=spec["mlp"],
        num_hidden_layers=spec["layers"], num_attention_heads=spec["heads"], num_key_value_heads=spec["heads"],
        max_position_embeddings=spec["max_pos"], tie_word_embeddings=spec["tied_head"],
        attention_dropout=spec["dropout"], bos_token_id=ids["bos"], eos_token_id=ids["eos"], pad_token_id=ids["pad"])
    torch.manual_seed(spec["init_seed"])
    model = LlamaForCausalLM(config).to(getattr(torch, spec["dtype"]))
    path = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(path)
    fixture_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_moe_dir(tmp_path_factory: pytest.TempPathFactory, fixture_tokenizer) -> Path:
    """A random Mixtral of two layers with four experts, of which two serve a token, and the fixture tokenizer."""
    from transformers import MixtralConfig, MixtralForCausalLM

    parts = fixture_parts()
    ids = parts["ids"]
    torch.manual_seed(6)
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=parts["vocab_size"], hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=parts["model_random"]["max_pos"], tie_word_embeddings=False, initializer_range=0.2,
        bos_token_id=ids["bos"], eos_token_id=ids["eos"], pad_token_id=ids["pad"]))
    path = tmp_path_factory.mktemp("models") / "moe"
    model.save_pretrained(path)
    fixture_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def test_data() -> Path:
    """Models and data too large for the repository; tests that need them are skipped where they are not given."""
    if "TROPISM_TEST_DATA" not in os.environ:
        pytest.skip("TROPISM_TEST_DATA is not set")
    return Path(os.environ["TROPISM_TEST_DATA"])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `some` says."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        count = min(family[0].get_closest_marker("some").args[0], len(family))
        kept = {round(number * (len(family) - 1) / max(count - 1, 1)) for number in range(count)}
        for number, item in enumerate(family):
            if number not in kept:
                item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Leave what all modules hold out of garbage collections, which some code under test asks for often."""
    gc.collect()
    gc.freeze()
