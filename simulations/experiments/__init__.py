"""Experiments over many runs: sweeps, papers' tables, tuning, simulated worlds with known answers."""
