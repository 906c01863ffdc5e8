"""What the scripts of bench/ share: models and rows, the work of a comparison, its sides, and their figures."""
