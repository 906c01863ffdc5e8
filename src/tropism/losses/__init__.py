"""Published losses as pure functions of per-completion log-probs."""

from tropism.losses.scored import Scored

__all__ = ["Scored"]
