"""Turns rows into trees, trees into packs, and packs into tensors."""
