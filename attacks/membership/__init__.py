"""Attacks that ask whether an example was in the batch behind an update."""
