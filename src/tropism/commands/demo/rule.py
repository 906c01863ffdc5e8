"""The house style that labels the demo's feedback.

A completion passes if it is a complete answer in plain prose that addresses the reader as "you".

- complete: it ends with a period, a question mark or an exclamation mark, so a completion that was cut off at the
  length limit fails;
- plain prose: one paragraph, without Markdown bold, bullets or numbered steps;
- addresses the reader: it contains "you", "your", "yours" or "yourself".

The rule judges style only, not whether the answer is true.
"""

import re

RULE = 'A complete answer in plain prose that addresses the reader as "you".'

_COMPLETE = re.compile(r"""[.!?]["'”’)]*$""")
_MARKUP = re.compile(r"\n|\*\*|^(?:[-*•#]|\d+[.)])\s")
_READER = re.compile(r"\b(?:you|your|yours|yourself)\b", re.IGNORECASE)


def passes(completion: str) -> bool:
    """Whether a completion follows the house style of `RULE`."""
    text = completion.strip()
    complete = _COMPLETE.search(text) is not None
    plain = _MARKUP.search(text) is None
    return complete and plain and _READER.search(text) is not None
