"""Refuses code that comes with a model, unless the command in hand allows it, and says how to allow it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from tropism.errors import ModelError, not_only_tensors

P = ParamSpec("P")
T = TypeVar("T")
_HOW = "If you trust it, pass --trust-remote-code"


@contextmanager
def code_refused(name: str, allowed: bool) -> Iterator[None]:
    """Give errors of loading that are about code sentences of their own.

    Args:
        name: of the model.
        allowed: the user allows code that comes with models.

    Raises:
        ModelError: if the model needs its code, or its weights are a pickle with more than tensors.
    """
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, ModelError) else error
        if not_only_tensors(cause):
            raise ModelError(f"{name}: the weights are not a pickle of tensors alone. Nothing in it was run. Use a "
                             "model with safetensors files.") from error
        if not allowed and "trust_remote_code" in str(cause):
            raise ModelError(f"{name}: needs Python code that comes with it, which was not run. {_HOW}") from error
        raise


def without_code(load: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that loads a `ModelSource`, or builds from a config, with `code_refused`."""
    @wraps(load)
    def loaded(*args: P.args, **kwargs: P.kwargs) -> T:
        source: Any = args[0]
        name = getattr(source, "name", None) or source.name_or_path
        with code_refused(str(name), bool(kwargs.get("trust_remote_code"))):
            return load(*args, **kwargs)

    return loaded


def check_kernels(config: Any, allowed: bool) -> None:
    """Refuse a config with an attention kernel of the Hub, which transformers would download and run.

    Raises:
        ModelError: with the kernel.
    """
    name = getattr(config, "_attn_implementation", None)
    kernels = [str(one) for one in (name.values() if isinstance(name, dict) else [name]) if "/" in str(one)]
    if kernels and not allowed:
        raise ModelError(f"{config.name_or_path}: attn_implementation names the kernel {kernels[0]}, which is code. It "
                         f"was not run. {_HOW}")
