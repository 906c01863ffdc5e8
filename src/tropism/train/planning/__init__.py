"""What a run needs: memory and time, counted before it begins, and the settings that follow."""
