"""The commands besides training, one module or folder each. They do not import each other."""
