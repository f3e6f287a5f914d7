"""Flower strategies: the validator in front of all of them, the curious and the malicious server, secure aggregation."""
