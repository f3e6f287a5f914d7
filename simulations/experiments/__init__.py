"""Experiments, each a grid in a TOML file: sweeps, and what papers' tables share with them."""
