"""Inference of the clients' defense from their updates."""
