"""Partners for KTO's reference point: another prompt's completion."""

from collections.abc import Hashable, Sequence


def partners(prompts: Sequence[Hashable]) -> list[int]:
    """For each unit of a step, the index of its partner: the next unit, cyclically, with another prompt.

    A unit is never its own partner, whatever the number of units or their order.

    Raises:
        ValueError: if all units have one prompt, since nobody has a partner then.
    """
    count = len(prompts)
    if len(set(prompts)) < 2:
        raise ValueError("a step needs two distinct prompts to have mismatched completions")
    result = [-1] * count
    following = -1
    for position in range(2 * count - 1, -1, -1):  # backwards twice: the second lap knows the cyclic successor
        here = position % count
        successor = (here + 1) % count
        following = successor if prompts[successor] != prompts[here] else following
        if position < count:
            result[here] = following
    return result
