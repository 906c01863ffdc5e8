"""Class weights for unpaired data."""

from typing import Literal


def class_weights(
    desirable: int, undesirable: int, desirable_weight: float | Literal["auto"],
    undesirable_weight: float | Literal["auto"],
) -> tuple[float, float]:
    """Class weights as numbers: `auto` is 1 for the larger class and n_major / n_minor for the smaller one."""
    major = max(desirable, undesirable)
    auto = (major / desirable if desirable else 1.0, major / undesirable if undesirable else 1.0)
    given = (desirable_weight, undesirable_weight)
    return (auto[0] if given[0] == "auto" else float(given[0]),
            auto[1] if given[1] == "auto" else float(given[1]))
