"""The step, the loop, evaluation, the reference and its store."""
