"""Hugging Face causal models: loading, tree attention, exact log-probs without logits, export."""
