"""`tropism chat`: talk to a model in the terminal, and collect feedback."""
