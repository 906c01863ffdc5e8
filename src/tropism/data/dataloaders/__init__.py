"""Batches that come from Python instead of files."""
