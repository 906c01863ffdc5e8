"""Training: the step, the loop, evaluation, checkpoints, and the frozen models with their store."""
