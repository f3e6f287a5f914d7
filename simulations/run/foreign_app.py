"""Where users' apps import `tap` and `curious` from, beside `fedgauge.server.tap`."""

from fedgauge.server.tap import curious, tap

__all__ = ["curious", "tap"]
