"""The house style behind the demo feedback.

An answer passes when it is a complete answer in plain prose that speaks to the reader as "you".

- complete: it ends with a full stop, a question mark or an exclamation mark, so an answer that
  was cut off at the length limit does not pass;
- plain prose: one paragraph, without Markdown bold, bullets or numbered steps;
- speaks to the reader: it says "you", "your", "yours" or "yourself" at least once.

The rule looks at style only. It does not ask whether the answer is true.
"""

import re

RULE = 'A complete answer in plain prose that speaks to the reader as "you".'

_COMPLETE = re.compile(r"""[.!?]["'”’)]*$""")
_MARKUP = re.compile(r"\n|\*\*|^(?:[-*•#]|\d+[.)])\s")
_READER = re.compile(r"\b(?:you|your|yours|yourself)\b", re.IGNORECASE)


def passes(answer: str) -> bool:
    """Return whether the answer follows the house style stated in `RULE`."""
    text = answer.strip()
    complete = _COMPLETE.search(text) is not None
    plain = _MARKUP.search(text) is None
    return complete and plain and _READER.search(text) is not None
