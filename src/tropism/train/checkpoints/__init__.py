"""Checkpoints: their files, saving, finding and resuming."""
