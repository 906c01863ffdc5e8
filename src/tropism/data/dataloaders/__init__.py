"""Reads the batches of published trainers' dataloaders back into rows."""
