"""What a run says of itself: metrics, the run directory, progress. Observers only read."""
