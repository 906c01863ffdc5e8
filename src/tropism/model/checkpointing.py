"""Activation checkpointing: what a forward pass keeps for the backward pass, and what is computed again."""

from typing import Literal

Checkpointing = Literal["none", "selective", "full"]
"""`none` keeps everything, `selective` the matrix products of each layer, `full` only the input of each layer."""
