"""PeftModels from Python: as policy, reference and teacher, and those that are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from integration.conftest import records
from integration.resuming import answers  # noqa: F401
from tropism.config import SFTOptions
from tropism.distributed import World
from tropism.errors import ModelError
from tropism.model.fingerprint import fingerprint
from tropism.model.language_model import LanguageModel
from tropism.runner import Run
from tropism.trainers import DPOTrainer, KDTrainer, SFTTrainer

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about kinds of layers


@pytest.fixture
def wrapped(tiny_model_dir: Path) -> Callable[..., Any]:
    """The tiny model in a PeftModel, with an adapter that is away from 0."""
    def make(config: str = "LoraConfig", **settings: Any) -> Any:
        import peft

        chosen = {"target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **settings}
        torch.manual_seed(1)
        return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), getattr(peft, config)(
            **{name: value for name, value in chosen.items() if value is not None}))

    return make


def learned(**more: Any) -> dict[str, Any]:
    return {"r": 2, "init_lora_weights": False, **more}


def test_the_scale_is_part_of_the_fingerprint(wrapped: Callable[..., Any]) -> None:
    """R2, C2: the same matrices with another alpha, or rank-stabilised, are another model; switched off all are one."""
    def prints(off: bool, **more: Any) -> str:
        model = wrapped(**learned(**more))
        if off:
            model.disable_adapter_layers()
        return fingerprint(LanguageModel(model.get_base_model(), "tree", "fp32", torch.device("cpu")))

    kinds: list[dict[str, Any]] = [{"lora_alpha": 8}, {"lora_alpha": 16}, {"lora_alpha": 8, "use_rslora": True},
                                   {"lora_alpha": 8, "alpha_pattern": {"q_proj": 4}}]
    assert len({prints(False, **kind) for kind in kinds}) == len(kinds)
    assert len({prints(True, **kind) for kind in kinds}) == 1
    assert prints(False, **kinds[0]) == prints(False, **kinds[0])


def test_as_reference_and_teacher(wrapped: Callable[..., Any], tiny_model_dir: Path, pairs: Path, answers: Path,  # noqa: F811
                                  tmp_path: Path) -> None:
    """R2: they count with their adapters: the figures are those of the merged models."""
    common = {"store": str(tmp_path / "store"), "max_steps": 1, "samples": 0, "quiet": True}
    found = []
    for number, model in enumerate((wrapped(**learned()), wrapped(**learned()).merge_and_unload())):
        one = DPOTrainer(str(tiny_model_dir), model, train_dataset=str(pairs), output=str(tmp_path / f"d{number}"),
                         **common).fit()
        other = KDTrainer(str(tiny_model_dir), teacher_model=model, train_dataset=str(answers),
                          output=str(tmp_path / f"k{number}"), **common).fit()
        found.append((records(one)[0]["loss"], records(other)[0]["kd/divergence"]))
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert found[0][1] > 1e-4


@pytest.mark.parametrize(("config", "settings", "match"), [
    ("LoHaConfig", {"r": 2}, "the .*LOHA"),
    ("PromptTuningConfig", {"num_virtual_tokens": 2, "target_modules": None}, "the .*PROMPT_TUNING"),
    ("LoraConfig", learned(target_modules=["lm_head", "q_proj"]), "on the head")])
def test_kinds_that_are_refused(wrapped: Callable[..., Any], tiny_model_dir: Path, answers: Path,  # noqa: F811
                                tmp_path: Path, config: str, settings: dict[str, Any], match: str) -> None:
    """L3, S1: with a sentence, and before anything is spent."""
    model = wrapped(config, **settings)
    common = {"train_dataset": str(answers), "output": str(tmp_path / "run"), "quiet": True}
    for trainer in (SFTTrainer(model, **common), KDTrainer(str(tiny_model_dir), teacher_model=model, **common)):
        with pytest.raises(ModelError, match=match):
            trainer.fit()
    assert not (tmp_path / "run").exists()


def test_adapters_that_do_not_compute_are_refused(wrapped: Callable[..., Any], answers: Path,  # noqa: F811
                                                  tmp_path: Path) -> None:
    """L3: switched off, or in the weights already: neither would be trained as it is."""
    off, merged = wrapped(**learned()), wrapped(**learned())
    off.disable_adapter_layers()
    merged.merge_adapter()
    for model, match in ((off, "switched off"), (merged, "merged into its weights")):
        with pytest.raises(ModelError, match=match):
            SFTTrainer(model, train_dataset=str(answers), output=str(tmp_path / "run"), quiet=True).fit()
    assert not (tmp_path / "run").exists()


def test_a_file_with_an_adapter_on_the_head(wrapped: Callable[..., Any], tiny_model_dir: Path, answers: Path,  # noqa: F811
                                            tmp_path: Path) -> None:
    """L3: it would be loaded, and never learn."""
    model = wrapped(**learned(target_modules=["lm_head", "q_proj"]))
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "adapter")
    options = {"data": str(answers), "output": str(tmp_path / "run")}
    for named in ({"model": str(tmp_path / "adapter")},
                  {"model": str(tiny_model_dir), "lora": {"adapter": str(tmp_path / "adapter")}}):
        with pytest.raises(ModelError, match=r"adapter: .*on the head \(lm_head\)"):
            Run(SFTOptions(**options, **named), World(0, 1, torch.device("cpu")))
    with pytest.raises(ModelError, match="on the head"):
        SFTTrainer(AutoModelForCausalLM.from_pretrained(tiny_model_dir), train_dataset=str(answers), quiet=True,
                   output=str(tmp_path / "run"), lora={"adapter": str(tmp_path / "adapter")}).fit()


def test_an_adapter_on_an_embedding(wrapped: Callable[..., Any], tiny_model_dir: Path, answers: Path,  # noqa: F811
                                    tmp_path: Path) -> None:
    """S1: peft keeps it under names of its own, which would be missing in the result; refused before anything is spent,
    and frozen it serves."""
    model = wrapped(**learned(target_modules=["embed_tokens", "q_proj"]), inference_mode=True)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "adapter")
    options = {"train_dataset": str(answers), "output": str(tmp_path / "run"), "quiet": True}
    for named, more in ((model, {}), (str(tmp_path / "adapter"), {}),
                        (str(tiny_model_dir), {"lora": {"adapter": str(tmp_path / "adapter")}})):
        with pytest.raises(ModelError, match=r"adapter on an embedding \(model.embed_tokens\).*modules_to_save"):
            SFTTrainer(named, **options, **more).fit()
    assert not (tmp_path / "run").exists()
    assert KDTrainer(str(tiny_model_dir), teacher_model=model, max_steps=1, samples=0, **options).fit().model.is_dir()


def test_what_is_said_of_the_start(wrapped: Callable[..., Any], tiny_model_dir: Path, pairs: Path,
                                   answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """The reference is the adapter as it begins only where a method has one, and none was named; an optimizer that was
    given is told by the manifest."""
    def said(trainer: Any, data: Path, *models: Any, **more: Any) -> str:
        model = wrapped(**learned())
        optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=0.1)
        count = len(list(tmp_path.glob("run*")))
        run = trainer(model, *models, train_dataset=str(data), store=str(tmp_path / "store"), max_steps=1, samples=0,
                      output=str(tmp_path / f"run{count}"), optimizer=optimizer, **more).fit()
        manifest = json.loads((run.directory / "manifest.json").read_text())
        assert manifest["given"] == {"optimizer": "SGD"}
        return " ".join(capsys.readouterr().out.split())

    line = "the reference is the model with this adapter"
    assert line in said(DPOTrainer, pairs)
    for text in (said(DPOTrainer, pairs, str(tiny_model_dir)), said(SFTTrainer, answers)):
        assert line not in text
        assert "starts from" in text
