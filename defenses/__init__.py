"""Defenses: one a file, each a Link that can be combined with others in any order."""

import fedgauge.client  # noqa: F401  (repairs torchvision before anything can import it)
