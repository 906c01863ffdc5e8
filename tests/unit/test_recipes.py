"""Each recipe is read as a run reads it, and fits the card that it names with the memory that it says."""

from pathlib import Path

import pytest

from recipes import FOLDER, RECIPES, card_of, options_of, plan_of, predicted_gib
from tropism.train.planning.devices import GPUS


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_what_its_name_says(recipe: Path) -> None:
    method, size, kind = recipe.stem.split("-")
    options = options_of(recipe)
    assert options.method == method
    assert size in options.model.lower()
    assert {"full": (False, None), "lora": (True, None), "qlora": (True, "nf4")}[kind] == (
        options.lora.wanted, options.lora.quantize)
    assert options.eval_fraction > 0
    assert card_of(recipe)[0] in GPUS
    assert f"tropism train {recipe.name}" in recipe.read_text(encoding="utf-8")


def test_the_sizes_and_ways_are_all_there() -> None:
    names = {recipe.stem for recipe in RECIPES}
    for method in ("kto", "dpo"):
        assert {f"{method}-0.5b-full", f"{method}-1.7b-full", f"{method}-1.7b-lora", f"{method}-8b-full",
                f"{method}-8b-lora", f"{method}-8b-qlora"} <= names
    listed = (FOLDER.parents[1] / "docs" / "init.md").read_text(encoding="utf-8")
    for recipe in RECIPES:
        card, gib = card_of(recipe)
        assert f"| `{recipe.stem}` |" in listed
        line = next(line for line in listed.splitlines() if f"`{recipe.stem}`" in line)
        assert (f"made for {card}" in line or f" x {card}" in line) if gib is None else f"{card}, {gib:.1f} GiB" in line


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_fits_its_card(recipe: Path, tmp_path: Path) -> None:
    plan = plan_of(recipe, tmp_path)
    assert plan.choice.fits
    if (stated := card_of(recipe)[1]) is not None:
        assert predicted_gib(plan) == pytest.approx(stated, rel=0.03, abs=0.1)
