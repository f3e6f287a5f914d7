"""Priors on images: -log p(x) up to a constant."""

from torch import Tensor


def total_variation(x: Tensor) -> Tensor:
    """Anisotropic total variation, mean |dx| + mean |dy| over all pixels; x (..., H, W) (Inverting Gradients, eq. 4)."""
    dx = (x[..., :, 1:] - x[..., :, :-1]).abs().mean()
    dy = (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
    return dx + dy
