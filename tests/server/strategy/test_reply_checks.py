"""What a client's guard says is taken as typed numbers within bounds, and otherwise not at all."""

import math
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedgauge.client.inspection.results import LARGEST
from fedgauge.server.strategy.checked import GuardReport


def report(**said: Any) -> GuardReport | None:
    message = Message(RecordDict({"guard": ConfigRecord(said)}), dst_node_id=1, message_type="train")
    return GuardReport.of(message)


@pytest.mark.usefixtures("identity")
def test_a_guards_report_is_typed_and_bounded() -> None:
    assert report(words="w", alarm=True, suspicion=2.5) == GuardReport("guard: w", True, 2.5)
    for beyond in (-1.0, 2 * LARGEST, math.inf, math.nan):
        assert report(words="w", alarm=False, suspicion=beyond) == GuardReport("guard: w", False, None)
    for wrong in ({"alarm": 1}, {"alarm": "yes"}, {"suspicion": "2"}, {"suspicion": [2.0]}, {"words": 3}):
        assert report(**{"words": "w", "alarm": True, "suspicion": 2.0, **wrong}) is None
    assert report(found="alarm, suspicion 9") is None
    assert GuardReport.of(Message(RecordDict(), dst_node_id=1, message_type="train")) is None


def test_a_sum_is_alarmed_if_one_of_its_clients_is() -> None:
    one, other = GuardReport("guard: a", False, None), GuardReport("guard: b", True, 3.0)
    assert GuardReport.together({}) is None
    assert GuardReport.together({4: one}) == GuardReport("client 4: guard: a", False, None)
    assert GuardReport.together({4: one, 7: other}) == GuardReport("client 4: guard: a; client 7: guard: b", True, 3.0)
