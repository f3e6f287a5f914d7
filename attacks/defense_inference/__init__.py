"""Which defense the clients use, read off their updates."""
