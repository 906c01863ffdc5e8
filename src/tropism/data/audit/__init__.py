"""Reports on data: what is kept, truncated or dropped, and what looks wrong."""
