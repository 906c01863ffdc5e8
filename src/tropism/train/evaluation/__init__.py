"""Metrics of held-out rows, their intervals, and sample answers."""
