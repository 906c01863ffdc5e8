"""A run whose matrix products oneDNN computes: the same result within rounding, and bit for bit when it is resumed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from integration.conftest import distance, records, weights
from tropism import DPOTrainer
from tropism.cli.app import main
from tropism.commands.scoring import engine
from tropism.errors import UsageError
from tropism.model import cpu_products
from tropism.model.cpu_products import available, products_of
from tropism.train.setup import build

pytestmark = pytest.mark.skipif(not available(), reason="this build of torch has no oneDNN products")

Train = Callable[..., Any]


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(build, "choose_products", lambda *args: "onednn")
    return monkeypatch


def test_results_differ_by_rounding(train: Train, monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path,
                                    capsys: pytest.CaptureFixture[str]) -> None:
    plain = train("kto")
    assert "matrix products" not in capsys.readouterr().out
    monkeypatch.setattr(build, "choose_products", lambda *args: "onednn")
    ours = train("kto")
    assert "matrix products: oneDNN, which is faster than MKL on this CPU" in capsys.readouterr().out
    assert json.loads((ours.directory / "manifest.json").read_text())["products"] == "onednn"
    one, other, start = weights(ours.model), weights(plain.model), weights(tiny_model_dir)
    assert 0 < distance(one, other) < 1e-4 * distance(other, start)


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 2}}], ids=["full", "lora"])
def test_a_resumed_run_keeps_its_library(train: Train, onednn: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    straight = train("dpo", max_steps=4, save_every=2, keep=0, **changes)
    file = next(straight.model.glob("*.safetensors"))
    before = file.read_bytes()
    onednn.setattr(build, "choose_products", lambda *args: pytest.fail("the choice is kept"))
    again = {"max_steps": 4, "save_every": 2, "keep": 0, "output": str(straight.directory), **changes,
             "resume": str(straight.directory / "checkpoints" / "step-00000002")}
    train("dpo", **again)
    assert file.read_bytes() == before
    onednn.setattr(build, "available", lambda: False)
    with pytest.raises(UsageError, match="matrix products with oneDNN, which this machine's CPU or torch"):
        train("dpo", **again)


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 2}}], ids=["full", "lora"])
def test_an_evaluation_computes_as_the_run(train: Train, onednn: pytest.MonkeyPatch, changes: dict[str, Any],
                                           tmp_path: Path) -> None:
    """To the bit. A machine without the library computes with the other one."""
    result = train("dpo", max_steps=2, eval_fraction=0.3, **changes)
    wanted = [record for record in records(result) if record["split"] == "eval"][-1]

    def evaluated() -> float:
        out = tmp_path / "figures.json"
        assert main(["evaluate", str(result.directory), "--store", str(tmp_path / "store"), "--json", str(out)]) == 0
        return float(json.loads(out.read_text())["metrics"]["loss"])

    assert evaluated() == wanted["loss"]
    onednn.setattr(engine, "available", lambda: False)
    assert evaluated() == pytest.approx(wanted["loss"], rel=1e-5)


def test_a_module_from_python_gets_its_own_products_back(onednn: pytest.MonkeyPatch, tiny_model_dir: Path, pairs: Path,
                                                         tmp_path: Path) -> None:
    """After each call; the next call computes as the run again."""
    module = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    trainer = DPOTrainer(module, train_dataset=pairs, eval_fraction=0.3, max_steps=1, samples=0, quiet=True,
                         output=str(tmp_path / "run"), store=str(tmp_path / "store"))
    last = [record for record in records(trainer.fit()) if record["split"] == "eval"][-1]
    assert not any("forward" in vars(layer) for layer in module.modules())
    used = []
    product = cpu_products._product
    onednn.setattr(cpu_products, "_product", lambda *args: used.append(args) or product(*args))
    assert trainer.evaluate()["loss"] == last["loss"]
    assert used
    assert products_of(module) == "mkl"
