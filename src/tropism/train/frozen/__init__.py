"""Frozen models, reference and teacher, and the stores of their scores."""
