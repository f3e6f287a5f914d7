"""Benchmarks of membership: who was in the batch behind an update, and whom a client's data holds after many rounds."""

from fedgauge.simulations.benchmarks.membership.benchmark import membership as membership
