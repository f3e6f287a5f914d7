"""Deployments: folder, keys, services, and their processes on one machine."""
