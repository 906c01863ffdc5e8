"""Text and messages to token ids."""
