"""Display of a run at work: terminal, plain lines, JSON log."""
