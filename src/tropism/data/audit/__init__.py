"""What is kept, cut and dropped, and what looks wrong in the data."""
