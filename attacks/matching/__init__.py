"""Gradient matching: one engine, and recipes that choose a likelihood and priors for it."""
