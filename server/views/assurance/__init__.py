"""What may be claimed of a run: what it tested, and whether what leaks stays below thresholds."""
