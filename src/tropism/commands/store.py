"""`tropism store list` and `tropism store clean`: scores of frozen models and rendered rows kept between runs."""

from datetime import datetime
from pathlib import Path

from tropism.errors import count_of
from tropism.observe.console import Voice
from tropism.store import size_text
from tropism.train.frozen import score_store
from tropism.train.options import default_root


def show(root: Path | None, voice: Voice) -> None:
    """Print what a store holds.

    Args:
        root: its directory; None for the default store.
    """
    root = root or default_root()
    models = score_store.entries(root)
    voice.say(f"{root}: scores of {count_of(len(models), 'frozen model')}")
    for model in models:
        numerics = [model.meta.get("precision"), model.meta.get("layout"), model.meta.get("holds")]
        voice.say(f"  {model.path.name}  {count_of(model.scores, 'score')}, {size_text(model.size_bytes)}, last used "
                  f"{_day(model.used)}  {model.meta.get('model', '?')} ({', '.join(filter(None, numerics)) or '?'})")
    blocks, size_bytes, used = score_store.rendered_rows(root)
    if blocks:
        voice.say(f"  rendered rows: {count_of(blocks, 'block')}, {size_text(size_bytes)}, last used {_day(used)}")


def clean(root: Path | None, fingerprint: str | None, voice: Voice) -> None:
    """Remove the scores of some models, or everything; a run computes again what it needs.

    Args:
        root: directory of the store; None for the default store.
        fingerprint: beginning of the models' fingerprints; None removes all scores and rendered rows.

    Raises:
        OutputError: if something cannot be removed.
    """
    root = root or default_root()
    voice.say(f"{root}: removed the scores of {count_of(score_store.clean(root, fingerprint), 'frozen model')}")


def _day(seconds: float) -> str:
    """The local date of a time stamp, which another program may have set to anything."""
    try:
        return datetime.fromtimestamp(seconds).date().isoformat()
    except (ValueError, OverflowError, OSError):
        return "?"
