"""Turns text and messages into token ids."""
