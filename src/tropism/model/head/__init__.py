"""Log-probs and divergences from hidden states, without materializing logits."""
