"""Monitoring of a run: guards, non-finite steps, early stopping."""
