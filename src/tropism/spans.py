"""The parts of an optimizer step that `--profile` tells apart. A span costs one comparison unless a profile is on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Literal, ParamSpec, TypeVar, get_args

from torch.profiler import record_function

P = ParamSpec("P")
T = TypeVar("T")
Part = Literal["data", "forward", "attention", "head", "backward", "optimizer", "communication", "host"]
"""`forward` and `backward` are the passes without attention and head, which count in both directions. `host` is what
remains of a step."""
PARTS: tuple[Part, ...] = get_args(Part)
PREFIX = "tropism."
"""How the names of spans in a trace begin."""
STEP = f"{PREFIX}step"

_state = {"on": False}


@contextmanager
def recording() -> Iterator[None]:
    """Name the spans that are entered in this context."""
    _state["on"] = True
    try:
        yield
    finally:
        _state["on"] = False


def timed_as(name: Part) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a function whose time belongs to a part of the step. The innermost part counts."""
    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> T:
            if not _state["on"]:
                return function(*args, **kwargs)
            with record_function(PREFIX + name):
                return function(*args, **kwargs)

        return within

    return decorate
