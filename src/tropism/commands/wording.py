"""Words that all commands share."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: `1 row`, `2 rows`, `0 rows`.

    Args:
        plural: of a noun that does not just take an s.
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
