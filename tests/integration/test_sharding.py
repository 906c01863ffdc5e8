"""A model that is spread over processes: the same weights, metrics and checkpoints as in one."""
