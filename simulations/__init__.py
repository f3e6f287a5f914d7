"""What runs a simulation and explains it: the command line, the launcher of Flower, the report, the scenarios."""

import fedgauge.client  # noqa: F401  (mends torchvision before anything can import it)
