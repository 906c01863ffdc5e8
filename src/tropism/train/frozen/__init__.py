"""Models that do not learn: reference and teacher, and the stores of their scores."""
