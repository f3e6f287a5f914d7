"""Outputs of a run: HTML report, PDF, figures, exports, and a client's own report."""
