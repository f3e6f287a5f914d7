"""Checks before a run: the doctor and the preflight."""
