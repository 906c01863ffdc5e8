"""Generation configs: what transformers would refuse to save is corrected when the model is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from tropism.model.generation import FILE, corrected, read_generation

SAMPLED = [
    ({"do_sample": False, "temperature": 0.9, "top_p": 0.6}, "temperature and top_p apply"),
    ({"temperature": 0.7}, "temperature applies"),
    ({"do_sample": None, "top_k": 20}, "top_k applies"),
    ({"do_sample": False, "min_p": 0.1, "typical_p": 0.9, "top_k": 5}, "min_p, typical_p and top_k apply"),
]
REJECTED = [
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"early_stopping": True}, "early_stopping"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"num_beams": 2, "num_return_sequences": 4}, "num_return_sequences"),
    ({"cache_implementation": "unknown"}, "cache_implementation"),
    ({"output_scores": True}, "output_scores"),
    ({"pad_token_id": -1}, "pad_token_id"),
    ({"suppress_tokens": [3], "forced_eos_token_id": 3}, "forced_eos_token_id"),
    ({"watermarking_config": {"seeding_scheme": "x"}}, "watermarking_config"),
    ({"max_new_tokens": "many"}, "max_new_tokens"),
]


def _read(values: dict[str, Any], path: Path) -> tuple[Any, list[str]]:
    (path / FILE).write_text(json.dumps(values))
    return read_generation(path)


@pytest.mark.parametrize(("values", "said"), SAMPLED)
def test_sampling_settings_turn_sampling_on(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    """The values are kept, since servers use them, and the config can be saved after a stop token is added."""
    found, notes = _read({**values, "eos_token_id": 2}, tmp_path)
    [note] = notes
    assert said in note
    assert note.startswith(str(tmp_path / FILE))
    assert found.do_sample is True
    assert all(getattr(found, name) == value for name, value in values.items() if name != "do_sample")
    found.eos_token_id = [2, 3]
    found.save_pretrained(tmp_path)
    assert json.loads((tmp_path / FILE).read_text())["eos_token_id"] == [2, 3]


@pytest.mark.parametrize(("values", "name"), REJECTED)
def test_a_rejected_setting_is_named_and_left_out(values: dict[str, Any], name: str, tmp_path: Path) -> None:
    found, notes = _read({"eos_token_id": 2, **values}, tmp_path)
    [note] = notes
    assert f"{name} = " in note
    assert getattr(found, name) in (None, getattr(GenerationConfig(), name))
    assert found.eos_token_id == 2
    found.validate(strict=True)


def test_a_valid_config_stays_the_same_object() -> None:
    given = GenerationConfig(do_sample=True, temperature=0.5, eos_token_id=3, custom={"a": [1]})
    found, notes = corrected(given)
    assert found is given
    assert notes == []


def test_unknown_settings_are_kept(tmp_path: Path) -> None:
    """Servers read settings that transformers does not know."""
    found, _ = _read({"temperature": 0.5, "thinking_budget": {"tokens": 4}}, tmp_path)
    assert found.thinking_budget == {"tokens": 4}


def test_without_a_file_there_is_none(tmp_path: Path) -> None:
    assert read_generation(tmp_path) == (None, [])
