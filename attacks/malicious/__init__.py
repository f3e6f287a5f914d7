"""Server attacks: weights or networks that a malicious server sends, and decoders of the updates that come back."""
