"""Inspection of the weights that a server sends."""
