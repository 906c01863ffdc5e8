"""The demo: a house style, feedback that follows it, and the prompts it came from."""
