"""Defenses: one a file, each a Link that combines with others in any order; `fedgauge.links` in pyproject.toml names them."""

import fedgauge.client  # noqa: F401  (repairs torchvision before anything can import it)
