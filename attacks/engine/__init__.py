"""The engine of optimising attacks: batched gradients, distances, optimisers, the scheduler and its memory limit."""
