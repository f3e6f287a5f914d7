"""Checks before a run: the doctor (machine, scenario, owner's file) and the preflight."""
