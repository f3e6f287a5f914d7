"""Attacks that solve for the input instead of searching for it."""
