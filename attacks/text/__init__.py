"""Attacks on sentences: exact ones that need no optimisation, matching with discrete moves, and learned inversion."""
