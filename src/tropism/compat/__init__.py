"""The constructors and methods of published trainers. Code written for one runs after its import is changed."""
