"""Grading: metrics, baselines, the replay check, canaries, and the audit that combines them."""
