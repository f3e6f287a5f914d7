"""What tests of data share: a table that is refused."""

import re
from typing import Any

import pytest

from fedgauge.client.components import SpecError
from fedgauge.client.federation import Federation
from fedgauge.client.protocol import Protocol


def refused(name: str, **data: Any) -> None:
    """The data are refused, before or by the check of a federation, with this name in the message."""
    with pytest.raises(SpecError, match=rf"\[data\].*{re.escape(name)}"):
        _ = Federation(Protocol(0, 1, 1, {"auxiliary": 1, **data}, {"use": "mlp"}, ())).shards
