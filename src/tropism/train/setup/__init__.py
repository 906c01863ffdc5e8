"""From options to an engine that is ready for step 1."""
