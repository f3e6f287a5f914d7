"""Searches in what a generator can make: its latents, its inner features, its weights."""
