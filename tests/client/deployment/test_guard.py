"""The guard: what does not pass stays at the client, and the server is not told why."""

import warnings

with warnings.catch_warnings():  # typer asks click for names that Click 9 will drop
    warnings.filterwarnings("ignore", "'click.utils.get_.*_stream' is deprecated", DeprecationWarning)
    import flwr.clientapp  # noqa: F401

import math

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedgauge.client.deployment.guard import REASON, WITHHELD, UpdatePolicy, guard
from fedgauge.client.mods import Mod
from fedgauge.client.update import Params, Update

pytestmark = pytest.mark.usefixtures("identity")

SENT = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.5])}


def behind(mod: Mod, reply: dict[str, Tensor], **more: ArrayRecord | MetricRecord) -> Message:
    """What leaves a ClientApp with this guard that answers with these arrays."""
    app = ClientApp()

    @app.train(mods=[mod])
    def train(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": ArrayRecord(reply), **more}), reply_to=message)

    content = RecordDict({"arrays": ArrayRecord(SENT), "config": ConfigRecord({"server-round": 1})})
    return app(Message(content, dst_node_id=2, message_type="train"), Context(1, 2, {}, RecordDict(), {}))


def moved(by: float) -> dict[str, Tensor]:
    """Weights whose update has this norm: (3, 4) / 5 of it on w."""
    return {"w": SENT["w"] + by * torch.tensor([0.6, 0.8]), "b": SENT["b"].clone()}


def held_back(reply: Message) -> bool:
    if not reply.has_error():
        return False
    assert (reply.error.code, reply.error.reason) == (WITHHELD, REASON) == (111, "withheld by the client's guard")
    assert not reply.has_content()
    return True


@pytest.mark.parametrize(("size", "stays"), [(0.0, False), (4.99, False), (5.01, True), (1e30, True)])
def test_the_norm_of_the_update_decides_not_that_of_the_weights(size: float, stays: bool) -> None:
    assert held_back(behind(guard(max_norm=5.0), moved(size))) == stays


def test_updates_are_looked_at_as_they_are() -> None:
    """fedgauge's clients answer with updates: 3, 4 has norm 5, whatever was sent."""
    update = {"w": torch.tensor([3.0, 4.0]), "b": torch.zeros(1)}
    assert not held_back(behind(guard(max_norm=5.001, replies="updates"), update))
    assert held_back(behind(guard(max_norm=4.999, replies="updates"), update))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_leaves(value: float) -> None:
    spoilt = {**moved(0.0), "b": torch.tensor([value])}
    assert held_back(behind(guard(), spoilt))
    assert held_back(behind(guard(), moved(0.0), buffers=ArrayRecord({"mean": torch.tensor([value])})))
    assert held_back(behind(guard(), moved(0.0), metrics=MetricRecord({"loss": value})))
    assert not held_back(behind(guard(), moved(0.0), metrics=MetricRecord({"loss": [1.0, 2.0]})))


def test_a_norm_beyond_single_precision_is_told_from_a_small_one() -> None:
    assert held_back(behind(guard(max_norm=1.0), {**SENT, "w": torch.tensor([3e38, 3e38])}))


def test_where_a_lower_value_leaks_more_its_audit_holds_back_up_to_the_threshold() -> None:
    policy = UpdatePolicy(threshold=0.1, unit="", higher_leaks=False)
    held = {leak: bool(policy.objection({}, lambda leak=leak: leak)) for leak in (0.05, 0.1, 0.2, math.inf)}  # type: ignore[misc]
    assert held == {0.05: True, 0.1: True, 0.2: False, math.inf: False}
    assert policy.objection({}, lambda: math.nan), "what is no number does not pass"


@pytest.mark.parametrize(
    ("leak", "stays"), [(19.9, False), (20.0, True), (60.0, True), (-math.inf, False), (math.nan, True)]
)
def test_its_own_audit_holds_back_from_the_threshold_on(leak: float, stays: bool) -> None:
    seen: list[tuple[Params, Update]] = []

    def audit(params: Params, update: Update) -> float:
        seen.append((params, update))
        return leak

    assert held_back(behind(guard(audit=audit, threshold=20.0), moved(2.0))) == stays
    ((params, update),) = seen
    assert torch.equal(params["w"], SENT["w"])
    torch.testing.assert_close(update["w"], torch.tensor([1.2, 1.6]))


def test_an_audit_that_can_say_nothing_lets_nothing_out() -> None:
    def audit(params: Params, update: Update) -> float:
        raise ValueError("does not apply to two examples")

    told: list[str] = []
    assert held_back(behind(guard(audit=audit, note=told.append), moved(0.1)))
    assert told == ["its audit failed: does not apply to two examples"]


def test_the_dear_check_comes_last() -> None:
    def audit(params: Params, update: Update) -> float:
        raise AssertionError("it was not needed")

    assert held_back(behind(guard(max_norm=1.0, audit=audit), moved(2.0)))


def test_the_owner_is_told_why_and_the_server_the_same_in_every_case() -> None:
    told: list[str] = []
    for reply in (moved(9.0), {**moved(0.0), "b": torch.tensor([math.nan])}):
        assert held_back(behind(guard(max_norm=5.0, note=told.append), reply))
    assert told == ["its norm is 9, above max_norm 5", "b: entries that are not finite"]


def test_an_error_goes_out_as_it_is() -> None:
    app = ClientApp()

    @app.train(mods=[guard(max_norm=1.0)])
    def train(message: Message, context: Context) -> Message:
        return Message(Error(100, "late"), reply_to=message)

    content = RecordDict({"arrays": ArrayRecord(SENT)})
    reply = app(Message(content, dst_node_id=2, message_type="train"), Context(1, 2, {}, RecordDict(), {}))
    assert (reply.error.code, reply.error.reason) == (100, "late")


def test_what_passes_is_the_very_reply() -> None:
    reply = behind(guard(max_norm=5.0), moved(1.0), metrics=MetricRecord({"num-examples": 3}))
    assert torch.equal(reply.content.array_records["arrays"].to_torch_state_dict()["w"], moved(1.0)["w"])
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 3}


def test_a_message_of_several_records_needs_one_called_arrays() -> None:
    app = ClientApp()

    @app.train(mods=[guard()])
    def train(message: Message, context: Context) -> Message:
        raise AssertionError("it is refused before")

    content = RecordDict({"a": ArrayRecord(SENT), "b": ArrayRecord(SENT)})
    with pytest.raises(ValueError, match="guard expects one ArrayRecord in a message, or one called 'arrays'"):
        app(Message(content, dst_node_id=2, message_type="train"), Context(1, 2, {}, RecordDict(), {}))


def test_integers_have_no_norm() -> None:
    assert UpdatePolicy(max_norm=1.0).objection({"n": torch.tensor([10**6])}) == ""


def test_complex_numbers_do_not_go_round_the_norm() -> None:
    reply = moved(0.1) | {"b": torch.tensor([1e6 + 0j])}
    assert held_back(behind(guard(max_norm=1.0), reply))
    assert "complex" in UpdatePolicy().objection({"b": reply["b"]})


def test_a_reply_under_other_names_does_not_go_round_the_norm() -> None:
    told: list[str] = []
    for names in (("weight", "b"), ("w",), ("w", "b", "c")):
        reply = {name: torch.full((2,), 1e6) for name in names}
        assert held_back(behind(guard(max_norm=1.0, note=told.append), reply))
    assert told == ["the reply has no weights with the names that were sent"] * 3
