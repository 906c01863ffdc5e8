"""What is said before step 1 about valid values that are seldom meant, and the line of an evaluation."""

import pytest

from tropism.config import KTOOptions
from tropism.data.schedule import GivenSchedule
from tropism.train.observers import described, shown
from tropism.train.setup.announce import doubtful
from tropism.train.setup.python_objects import PythonObjects


def notes(rows: int = 100, objects: PythonObjects | None = None, **options: object) -> list[str]:
    given = KTOOptions.model_validate({"model": "m", "data": "d", "output": "o", **options})
    return doubtful(given, rows, objects or PythonObjects())


@pytest.mark.parametrize("options", [
    {}, {"batch_size": 100}, {"learning_rate": 1e-2}, {"learning_rate": 0.5, "optimizer": "sgd"},
    {"learning_rate": 1e-4, "lora": {"rank": 8}}])
def test_usual_values_need_no_note(options: dict[str, object]) -> None:
    assert notes(**options) == []


def test_a_batch_larger_than_the_data() -> None:
    """H3: with the number of rows and what follows."""
    note, = notes(rows=31)
    assert note == ("--batch-size 32 exceeds the 31 training rows, so each epoch is one optimizer step of 31 rows. For "
                    "more steps, use a lower --batch-size.")
    assert notes(rows=1)[0].startswith("--batch-size 32 exceeds the 1 training row,")
    assert notes(rows=3, objects=PythonObjects(steps=GivenSchedule(((0, 1), (2,)), 3))) == []  # its batches are given


@pytest.mark.parametrize("rate", [0.0101, 0.02, 5])
@pytest.mark.parametrize("lora", [{}, {"rank": 8}])
def test_a_very_high_learning_rate(rate: float, lora: dict[str, int]) -> None:
    note, = notes(learning_rate=rate, lora=lora)
    assert note.startswith(f"--learning-rate {rate:g} is very high for AdamW")


def test_the_optimizer_of_a_user_has_its_own_rate() -> None:
    assert notes(objects=PythonObjects(optimizer=object()), learning_rate=5) == []
    assert notes(learning_rate=0) == ["--learning-rate is 0, so training changes nothing"]


@pytest.mark.parametrize(("metrics", "line"), [
    ({"loss": 0.5, "rewards/auc": 0.75, "rewards/auc_low": 0.5, "rewards/auc_high": 0.875, "rewards/margins": 0.25,
      "logps/chosen": -4.0}, "loss 0.5000  reward AUC 0.750 (95%: 0.500 to 0.875)  margin +0.2500"),
    ({"rewards/margins": -1.0, "rewards/accuracies": 1.0, "loss": 2.0},
     "loss 2.0000  reward accuracy 1.000  margin -1.0000"),
    ({"loss": 1.0, "perplexity": 2.71828}, "loss 1.0000  perplexity 2.718"),
    ({"kd/divergence": 0.125, "loss": 1.0}, "loss 1.0000  divergence 0.1250")])
def test_the_line_of_an_evaluation(metrics: dict[str, float], line: str) -> None:
    """L5: what one looks at first, in one line."""
    assert described(metrics) == line


def test_the_line_of_a_step() -> None:
    assert shown({"loss": 0.5, "rewards/margins": -0.25, "tokens_per_second": 12345.6}) == {
        "loss": "0.5000", "margin": "-0.2500", "tokens/s": "12,346"}
