"""Texts that would act on a terminal, a page or a card, if somebody printed them as they are."""

import ctypes
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import strategies as st

PAYLOADS = (
    r"\[/x]", "[/x]", "[link=file:///etc]a[/link]", "[bold", ":smile:", "{task.fields[text]}", "{", "%s",
    "\x1b[2J\x1b[31m", "\x1b]52;c;eA==\x07", "\x1b]8;;http://a\x1b\\b\x1b]8;;\x1b\\", "\x9b31m", "\x90q\x9c", "a\rb",
    "a\b\bb", "\x7f", "\x00", "a\nverdict: intact\n", "\u202egnp.exe", "\u2066a\u2069", "\u2028", "\u200b", "\x85",
    "\x0b\x0c\x1c", "\t", "\ud800", os.fsdecode(b"\xff"), "\U000e0001", "<script>alert(1)</script>",
    "\"'><img src=x onerror=alert(1)>", "`` ` ```", "| a |", "](javascript:x)", "---\nkey: 1", "{{ 1 }}", "${x}",
    "&lt;", "=cmd|' /C x'!A1", "x" * 10_000)

TEXTS = st.one_of(st.sampled_from(PAYLOADS), st.text(st.characters(exclude_categories=()), max_size=40),
                  st.lists(st.sampled_from(PAYLOADS[:-1]), max_size=4).map("".join))
"""Any text, and often one that is made to do harm."""

STYLING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def is_harmless(text: str) -> bool:
    """True if a terminal only shows it."""
    return all(char.isprintable() or char == "\n" for char in text)


@contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Let file permissions hold, which they do not for root."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, before, after = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(), (ctypes.c_uint32 * 6)()
    for held in (before, after):
        assert libc.capget(header, held) == 0
    after[0] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
    assert libc.capset(header, after) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0
