"""`tropism evaluate` and `tropism score`: a model on held-out rows, without training."""
