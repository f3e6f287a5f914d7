"""What every optimising attack runs on: batched gradients, distances, optimisers, the scheduler and its memory limit."""
