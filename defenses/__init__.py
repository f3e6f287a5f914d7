"""What wraps a client: one defense a file, each a Link that composes with any other in any order and position."""

import fedgauge.client  # noqa: F401  (mends torchvision before anything can import it)
