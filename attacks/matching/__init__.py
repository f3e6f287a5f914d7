"""Gradient matching: recipes of one engine, each a likelihood times a prior."""
