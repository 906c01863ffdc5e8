"""Rows to trees, trees to packs, packs to tensors."""
