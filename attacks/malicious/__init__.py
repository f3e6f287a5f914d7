"""Server attacks: the weights or networks a malicious server sends, and the decoders that read the answers."""
