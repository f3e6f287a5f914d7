"""A deployment: its folder, keys, services, and the processes on one machine."""
