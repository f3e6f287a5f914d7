"""The server: curious and malicious strategies, the run's ledger and tape, the attack service, views and the live page."""

import fedgauge.client  # noqa: F401  (mends torchvision before anything can import it)
