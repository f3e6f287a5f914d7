"""Attacks on rows of tables."""
