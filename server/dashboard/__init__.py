"""The page that shows runs: it reads ledgers and reconstructions, and writes nothing."""

import fedgauge.client  # noqa: F401  (mends torchvision before anything can import it)
