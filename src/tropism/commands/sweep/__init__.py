"""Trains a configuration several times with different values of options, and compares the results."""
