"""What tests of attacks share: what cannot be done, and a truth of the test's own."""

from collections.abc import Callable

import pytest

from fedgauge.attacks.base import Wave
from fedgauge.attacks.source import FederationSource
from fedgauge.client.federation import Federation
from fedgauge.client.update import Batch


def check_named(name: str, act: Callable[[], object]) -> None:
    """What cannot be done is refused by the name of what stands against it."""
    with pytest.raises(ValueError, match=name):
        act()


def with_truth(federation: Federation, truth: Callable[[int, int], Batch]) -> FederationSource:
    """The federation's updates, graded against other examples."""

    class OtherTruth(FederationSource):
        def truth(self, client: int, round: int) -> Batch:
            return truth(client, round)

        def trained_on(self, wave: Wave, client: int) -> Batch | None:
            return None

    return OtherTruth(federation)
