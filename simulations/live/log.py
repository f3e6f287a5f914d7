"""Events of the JSON log; light to import, as every command needs it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal

Log = Literal["auto", "quiet", "json"]


def emit(event: str, **facts: object) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    print(json.dumps({"event": event, "time": now, **facts}, allow_nan=False), flush=True)


@contextmanager
def errors_in_log(log: Log) -> Iterator[None]:
    """Emit what ends a command as an event of a JSON log."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if log == "json" and not isinstance(error, BrokenPipeError):  # then there is no reader
            emit("error", words=str(error) or "stopped")
        raise
