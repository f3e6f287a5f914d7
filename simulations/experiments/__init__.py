"""Experiments over many runs: sweeps, papers' tables, tuning, worlds with known answers."""
