"""What a run shows while it works: terminal, plain lines, JSON log."""
