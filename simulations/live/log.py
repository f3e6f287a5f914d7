"""Events of the JSON log; light to import, as every command needs it."""

import json
from argparse import Namespace
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Literal

Log = Literal["auto", "quiet", "json"]
Command = Callable[[Namespace], int]


def emit(event: str, **facts: object) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    print(json.dumps({"event": event, "time": now, **facts}, allow_nan=False), flush=True)


def with_errors(command: Command) -> Command:
    """Wrap a command so that --log json also emits an error."""

    @wraps(command)
    def run(options: Namespace) -> int:
        try:
            return command(options)
        except (Exception, KeyboardInterrupt) as error:
            if options.log == "json" and not isinstance(error, BrokenPipeError):  # then there is no reader
                emit("error", words=str(error) or "stopped")
            raise

    return run
