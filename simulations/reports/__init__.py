"""What a run leaves for its readers: HTML report, figures, exports, a client's own report."""
