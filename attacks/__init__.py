"""Attacks on updates, and their grading; needs only torch and the client package."""

import fedgauge.client  # noqa: F401  (mends torchvision before anything can import it)
