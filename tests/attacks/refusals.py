"""What tests of attacks share: what cannot be done."""

from collections.abc import Callable

import pytest


def check_named(name: str, act: Callable[[], object]) -> None:
    """What cannot be done is refused by the name of what stands against it."""
    with pytest.raises(ValueError, match=name):
        act()
