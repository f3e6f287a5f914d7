"""Gradients of many problems in one pass, twice differentiable."""
