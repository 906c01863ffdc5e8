"""Checkpoints: files, saving, finding, resuming."""
