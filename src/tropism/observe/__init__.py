"""What a run reports: metrics, the run directory, progress. Observers only read."""
