"""The dimension legend, used in every signature that takes or returns a tensor.

    T  packed tokens of a batch          C  distinct completions of a batch
    S  supervised tokens of a batch      U  units of the loss: rows of a batch
    V  vocabulary                        P  pairs
    D  hidden size

The aliases are jaxtyping annotations: plain tensors to a type checker, checked at run time in the tests.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

PerToken = Float[Tensor, " S"]
PerCompletion = Float[Tensor, " C"]
PerUnit = Float[Tensor, " U"]
Scalar = Float[Tensor, ""]
Hidden = Float[Tensor, "S D"]
HeadWeight = Float[Tensor, "V D"]
TokenIndex = Int[Tensor, " S"]
Lengths = Int[Tensor, " C"]
Labels = Bool[Tensor, " U"]

__all__ = [
    "HeadWeight",
    "Hidden",
    "Labels",
    "Lengths",
    "PerCompletion",
    "PerToken",
    "PerUnit",
    "Scalar",
    "TokenIndex",
]
