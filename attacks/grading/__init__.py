"""How well an attack did: metrics, baselines, the replay check, canaries, and the audit that brings them together."""
