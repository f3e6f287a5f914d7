"""`tap` and `curious` for users' apps, as in `fedgauge.server.tap`; the name that apps imported before."""

from fedgauge.server.tap import curious, tap

__all__ = ["curious", "tap"]
