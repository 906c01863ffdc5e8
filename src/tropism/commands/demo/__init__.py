"""`tropism demo`: a house style, feedback labeled by it, and the prompts of that feedback."""
