"""What sees, dispatches and records: the door, the curious strategy, the ledger and tape, the attack pool."""

import fedgauge.client  # noqa: F401  (mends torchvision before anything can import it)
