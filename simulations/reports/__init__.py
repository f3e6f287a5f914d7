"""Outputs of a run: HTML report, figures, exports, and a client's own report."""
