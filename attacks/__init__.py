"""What inverts a client, and grades the result: attacks need torch and the client package alone."""

import fedgauge.client  # noqa: F401  (mends torchvision before anything can import it)
