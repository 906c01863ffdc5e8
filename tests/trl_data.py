"""Rows in TRL's formats, for the tests of its door."""

import random
from typing import Any

WORDS = ["oak", "elm", "ash", "fir", "yew", "bay", "box", "fig", "may", "sea", "sky", "sun"]


def rows_for(method: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Plain text for kto, dpo and sft; `text` and `chat` for other formats of SFT; conversations for gkd."""
    generator = random.Random(seed)

    def words(most: int) -> str:
        return " ".join(generator.choices(WORDS, k=generator.randint(1, most)))

    found = []
    for index in range(count):
        prompt, one, other = words(10) + "?", " " + words(8) + ".", " " + words(8)
        said = [{"role": "user", "content": prompt}, {"role": "assistant", "content": one}]
        found.append({
            "dpo": {"prompt": prompt, "chosen": one, "rejected": other},
            "implicit": {"chosen": prompt + one, "rejected": prompt + other},
            "dpo_chat": {"prompt": said[:1], "chosen": said[1:], "rejected": [{**said[1], "content": other}]},
            "implicit_chat": {"chosen": said, "rejected": [said[0], {**said[1], "content": other}]},
            "kto": {"prompt": prompt, "completion": one, "label": index % 3 > 0},
            "kto_chat": {"prompt": said[:1], "completion": said[1:], "label": index % 3 > 0},
            "sft": {"prompt": prompt, "completion": one}, "text": {"text": prompt + one},
            "sft_chat": {"prompt": said[:1], "completion": said[1:]},
            "chat": {"messages": said}, "gkd": {"messages": said},
            "sharegpt": {"conversations": [{"from": turn["role"], "value": turn["content"]} for turn in said]},
        }[method])
    return found
