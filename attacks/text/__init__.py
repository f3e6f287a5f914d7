"""Attacks on sentences: exact reading without optimisation, gradient matching with discrete moves, learned inversion."""
