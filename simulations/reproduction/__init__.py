"""Reproduction of published tables, the suite and the challenge; only in a clone."""
