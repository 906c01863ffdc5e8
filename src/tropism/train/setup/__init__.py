"""Builds the engine of a run from its options."""
