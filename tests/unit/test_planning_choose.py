"""Which settings `auto` takes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tropism.config import SFTOptions
from tropism.train.planning.choose import candidates, choose, limit_of, unpredicted
from tropism.train.planning.devices import GPUS, Device
from tropism.train.planning.memory import KEPT, Needs, Pass
from tropism.train.settings import Settings

MIB = 2**20
HELD = {"weights": 500 * MIB, "gradients": 500 * MIB, "optimizer": 1000 * MIB, "reference": 0, "teacher": 0}
PER_TOKEN = {"none": 2 * MIB, "selective": MIB, "full": MIB / 4}


def needs(settings: Settings) -> Needs:
    level = settings.checkpointing

    def at(tokens: int) -> Pass:
        return Pass(tokens, {"forward": {"activations": tokens * PER_TOKEN[level]},
                             KEPT: {"activations": tokens * MIB / 16, "weights": 500 * MIB},
                             "backward": {"activations": tokens * PER_TOKEN[level] / 2, "gradients": 500 * MIB}})

    return Needs(400 * MIB, HELD, at(500), at(2000))


def options(**values: Any) -> SFTOptions:
    return SFTOptions(model="m", data="d", output="o", **values)


def chosen(limit: float, kept: Settings | None = None, largest: int = 100, **values: Any) -> Any:
    given = options(**values)
    return choose(candidates(given, "cpu", kept), int(limit * MIB), "memory_limit" in values, needs, largest, 30_000)


@pytest.mark.parametrize(("limit", "tokens", "checkpointing"), [
    (20_000, 2048, "none"), (5_000, 1024, "none"), (3_700, 512, "none"), (3_100, 512, "selective"),
    (2_800, 512, "full"), (2_620, 256, "full")])
def test_the_fastest_settings_that_fit_are_chosen(limit: int, tokens: int, checkpointing: str) -> None:
    found = chosen(limit)
    assert found.fits
    assert (found.settings.microbatch_tokens, found.settings.checkpointing) == (tokens, checkpointing)
    assert sum(found.components.values()) <= limit * MIB
    assert f"packs of {tokens:,} tokens" in found.sentence


def test_a_prediction_never_exceeds_the_limit_unless_the_log_says_so() -> None:
    for limit in range(1000, 9000, 250):
        found = chosen(limit)
        assert found.fits == (sum(found.components.values()) <= 0.95 * limit * MIB)
        assert found.fits or "more than there is" in found.sentence
    assert "Weights and optimizer state alone need 2.3 GiB" in chosen(1000, memory_limit="1GiB").sentence
    assert "the limit of 1.0 GiB" in chosen(1024, memory_limit="1GiB").sentence


def test_all_of_a_gpu_is_used_before_packs_become_small() -> None:
    """Weights of three quarters of a card do not bring packs of 128 tokens."""
    least = replace(needs(Settings(checkpointing="full")), held={**HELD, "weights": 5000 * MIB})
    found = choose(candidates(options(), "cuda", None), round((least.peak(8192) + 100 * MIB) / 0.95), False,
                   lambda settings: replace(needs(settings), held=least.held), 100, 30_000, "cuda")
    assert found.fits
    assert (found.settings.microbatch_tokens, found.settings.checkpointing) == (8192, "full")


def test_options_and_kept_choices_win() -> None:
    kept = Settings(700, "selective")
    assert chosen(20_000, kept).settings == kept
    assert chosen(2_500, kept).settings == kept
    assert chosen(20_000, kept, microbatch_tokens=300, checkpointing="none").settings == Settings(300, "none")
    assert chosen(2_620, microbatch_tokens=1024).settings.microbatch_tokens == 1024
    assert chosen(20_000, compile="on").settings.compiled
    assert chosen(20_000, checkpointing="full", offload_checkpoints=True).settings.offload


def test_a_tree_that_no_pack_divides_counts() -> None:
    assert chosen(3_100, largest=1000).settings.checkpointing == "full"
    assert chosen(3_100, largest=100).settings.checkpointing == "selective"


@pytest.mark.parametrize(("limit", "tokens"), [(3_000, 5_390), (4_000, 20_000), (20_000, 37_500)])
def test_forward_passes_come_first_in_steps_of_what_fits(limit: int, tokens: int) -> None:
    """Those of packs of 512 tokens, which keep 1/16 MiB per token until their backward passes. Steps have 30,000
    tokens, and later ones may have a quarter more."""
    given = options(microbatch_tokens=512, checkpointing="full")
    tried = candidates(given, "cpu", None)
    apart = choose(tried, limit * MIB, False, needs, 100, 30_000)
    assert (apart.forwards_first_tokens, apart.with_forwards_first(0)) == (0, apart)
    found = choose(tried, limit * MIB, False, needs, 100, 30_000, saves=True)
    assert found.settings == apart.settings
    assert found.fits
    assert found.forwards_first_tokens == pytest.approx(tokens, rel=0.02)
    more = sum(found.components.values()) - sum(apart.components.values())
    assert more == pytest.approx(1.04 * (found.forwards_first_tokens - 512) * MIB / 16, rel=1e-6)
    agreed = found.with_forwards_first(1000)
    assert agreed.settings.forwards_first_tokens == 1000
    assert agreed.sentence.endswith("all forward passes of a step come before its backward passes")


def test_forward_passes_come_first_with_full_checkpointing_only() -> None:
    for level, saves in (("none", True), ("selective", True), ("full", False)):
        tried = candidates(options(microbatch_tokens=512, checkpointing=level), "cpu", None)
        assert choose(tried, 20_000 * MIB, False, needs, 100, 30_000, saves=saves).forwards_first_tokens == 0
        assert unpredicted(tried, None, 5000).forwards_first_tokens == (5000 if level == "full" else 0)
    tried = candidates(options(microbatch_tokens=512, checkpointing="full"), "cpu", None)
    assert choose(tried, 20_000 * MIB, False, needs, 100, 500, saves=True).forwards_first_tokens == 0  # one pack
    kept = Settings(512, "full", forwards_first_tokens=9000)
    assert candidates(options(), "cpu", kept) == [kept]
    assert not any(one.forwards_first_tokens for one in candidates(options(checkpointing="none"), "cpu", kept))
    resumed = choose([kept], 20_000 * MIB, False, needs, 100, 30_000)
    assert resumed.settings == kept
    more = sum(resumed.components.values()) - sum(needs(kept).components(512).values())
    assert more == pytest.approx(1.04 * (9000 - 512) * MIB / 16, rel=1e-6)


def test_limits_and_failures() -> None:
    assert limit_of(options(memory_limit="2GiB"), 5) == 2**31
    assert limit_of(options(), 5) == 5
    tried = candidates(options(), "cpu", None)
    assert tried[0] == Settings(2048, "none")
    assert unpredicted(tried, None).settings == unpredicted(tried, ValueError("odd.")).settings == tried[0]
    assert "ValueError: odd)" in unpredicted(tried, ValueError("odd.")).sentence
    found = chosen(20_000)
    assert found.at(tried, 0) is found
    assert found.at(tried, 3).settings == tried[3]


@pytest.mark.parametrize("value", ["much", "-1GiB", "0", "20 Gib per GPU"])
def test_a_limit_is_a_size(value: str) -> None:
    with pytest.raises(ValueError, match="size"):
        options(memory_limit=value)


def test_time_is_the_longer_of_compute_and_traffic() -> None:
    device = Device("test", "cuda", 1, {torch.float32: 1e12, torch.bfloat16: 4e12}, 1e11, 1e-5, attained=1.0)
    assert device.clock(1e12, 0, torch.float32, "products") == 1.0
    assert device.clock(1e12, 0, torch.bfloat16, "products") == 0.25
    assert device.clock(1e9, 1e11, torch.float32, "element-wise") == 1.0
    assert replace(device, kind="cpu").clock(1e12, 0, torch.float32, "products") == 1.0 + 1e-5
    assert all(gpu.memory_bytes < 150 * 2**30 and gpu.bandwidth > 1e12 for gpu in GPUS.values())
