"""Run and explain simulations: the command line, the launcher of Flower, the report, the scenarios."""

import fedgauge.client  # noqa: F401  (mends torchvision before anything can import it)
