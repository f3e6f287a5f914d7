"""Attacks that learn on auxiliary data: ridge inversion, Learning To Invert, generators."""
