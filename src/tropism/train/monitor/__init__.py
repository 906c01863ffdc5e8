"""What watches a run: guards, non-finite steps, early stopping."""
