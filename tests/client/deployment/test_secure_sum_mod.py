"""The secure sum: as a Flower mod, masked integers leave the client, and nothing else does; the ideal one of simulations."""

import io
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedgauge.attacks.base import LIMITS
from fedgauge.client.components import SpecError
from fedgauge.client.deployment.secure_sum import PairwiseMasking, Record, Refused, SecureSumResult
from fedgauge.client.deployment.secure_sum_mod import ARRAYS, RECORD, read, secure_sum, to_config_record
from fedgauge.client.federation import Federation
from fedgauge.client.mods import as_mod
from fedgauge.client.protocol import Protocol
from fedgauge.defenses.clip import clip
from fedgauge.server.store.scenario import plan_of
from tests.wire import travel

pytestmark = pytest.mark.usefixtures("identity")

THETA = {
    "weight": torch.tensor([[1.0, -2.0], [0.5, 4.0]]),
    "bias": torch.tensor([3.0, 0.0]),
    "num_batches_tracked": torch.tensor(7),
}
TERMS = PairwiseMasking(group=3, clip=8.0, threshold=2)
CLIENTS = (5, 6, 7)
AGAIN = "asked to {} again in a session"
Train = Callable[[Message, Context], RecordDict | Error]


def trained(node: int, **changes: Any) -> RecordDict:
    """Weights that have moved by node / 10 everywhere, and by 3 in one place; node examples."""
    moved = {k: t + node / 10 if t.is_floating_point() else t + 2 for k, t in THETA.items()}
    moved["bias"] = moved["bias"] + torch.tensor([3.0, 0.0])
    metrics = MetricRecord({"num-examples": node, "loss": 0.5})
    return RecordDict({"model": ArrayRecord(moved | changes), "numbers": metrics})


class Nodes:
    """Three nodes with an ordinary ClientApp under the mod, asked without a server."""

    def __init__(self, train: Train | None = None, inner: Any = ()) -> None:
        self.contexts = {n: Context(1, n, {}, RecordDict(), {}) for n in CLIENTS}
        self.seen: list[Message] = []
        self.app = ClientApp()

        @self.app.train(mods=[secure_sum(TERMS), *inner])
        def run(message: Message, context: Context) -> Message:
            self.seen.append(message)
            made = train(message, context) if train else trained(context.node_id)
            return Message(made, reply_to=message)

    def ask(self, node: int, question: Record, arrays: bool = False) -> Message:
        content = to_config_record(question)
        content["config"] = ConfigRecord({"lr": 0.1})
        if arrays:
            content["arrays"] = ArrayRecord(THETA)
        message = travel(Message(content, dst_node_id=node, message_type="train"))
        return travel(self.app(message, self.contexts[node]))

    def converse(self) -> tuple[SecureSumResult, list[dict[int, Message]]]:
        """The whole conversation: the sum, and each step's replies."""
        server = TERMS.rounds(CLIENTS, 6)
        questions, replies = next(server), []
        try:
            for step in range(5):
                asked = {n: self.ask(n, q, arrays=step == 2) for n, q in questions.items()}
                replies.append(asked)
                questions = server.send({n: read(m.content) for n, m in asked.items()})
        except StopIteration as end:
            return end.value, replies
        raise AssertionError("a sixth question")


def test_nothing_but_masked_integers_leaves() -> None:
    _, replies = Nodes().converse()
    for node, reply in replies[2].items():
        assert sorted(reply.content) == [RECORD, ARRAYS]
        assert dict(reply.content.config_records[RECORD]) == {}
        (vector,) = reply.content.array_records[ARRAYS].values()
        assert vector.numpy().dtype == np.uint64
        assert vector.numpy().shape == (7,), "six entries and the number of examples"
        assert not set(vector.numpy().tolist()) & set(TERMS.quantise(np.zeros(6), node).tolist())
    assert all(sorted(m.content) == [RECORD] for step in (0, 1, 3, 4) for m in replies[step].values())


def test_defenses_nearer_to_the_training_act_before_the_masks() -> None:
    """Each update of norm sqrt(5 a^2 + (3 + a)^2) is clipped to 1, in its own direction."""
    found, _ = Nodes(inner=[as_mod(clip(1.0))]).converse()
    expected = np.zeros(6)
    for node in CLIENTS:
        update = np.full(6, node / 10) + np.eye(6)[4] * 3
        expected += node * update / np.linalg.norm(update) / 18
    assert found.mean == pytest.approx(expected, abs=2e-6)


def test_a_server_that_asks_for_an_update_alone_gets_none() -> None:
    nodes = Nodes()
    message = Message(RecordDict({"arrays": ArrayRecord(THETA)}), dst_node_id=5, message_type="train")
    with pytest.raises(Refused):
        nodes.app(travel(message), nodes.contexts[5])
    assert nodes.seen == []


def asked_to_mask(nodes: Nodes) -> dict[int, Record]:
    server = TERMS.rounds(CLIENTS, 6)
    questions = next(server)
    for _ in range(2):
        questions = server.send({n: read(nodes.ask(n, q).content) for n, q in questions.items()})
    return questions


def test_an_error_of_the_clientapp_passes_and_the_client_has_masked_nothing() -> None:
    nodes = Nodes(lambda message, context: Error(100, "too late"))
    question = asked_to_mask(nodes)[5]
    reply = nodes.ask(5, question, arrays=True)
    assert (reply.error.code, reply.error.reason) == (100, "too late")
    assert nodes.contexts[5].state.config_records[RECORD]["step"] == "share"
    with pytest.raises(Refused):
        nodes.ask(5, question, arrays=True)


def of_two_processes(ask: Callable[[], Message]) -> list[str]:
    """What two processes make of one question that both have before either answers: "answered", or an error's text."""
    pipes = [os.pipe(), os.pipe()]
    start, go = os.pipe()
    for into in (into for _, into in pipes):
        if not os.fork():
            try:
                os.close(go)
                os.read(start, 1)  # until nobody can write: both begin together
                reply = ask()
                os.write(into, (reply.error.reason if reply.has_error() else "answered").encode())
            except BaseException as error:
                os.write(into, str(error).encode())
            finally:
                os._exit(0)
    os.close(go)
    for _ in pipes:
        os.wait()
    return sorted(os.read(out, 1000).decode() for out, _ in pipes)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("step", [0, 2])
def test_of_two_processes_with_one_state_one_answers(step: int) -> None:
    """Flower may hand two messages to two processes, each with the state from before either was answered."""
    nodes, server = Nodes(), TERMS.rounds(CLIENTS, 6)
    questions = next(server)
    for earlier in range(step):
        questions = server.send({n: read(nodes.ask(n, q, arrays=earlier == 2).content) for n, q in questions.items()})
    asked = questions[5]
    found = of_two_processes(lambda: nodes.ask(5, asked, arrays=step == 2))
    assert found[0] == "answered" and re.search(AGAIN.format(asked["step"]), found[1]), found


@pytest.mark.parametrize(
    "content",
    [
        lambda: trained(5, extra=torch.zeros(1)),
        lambda: trained(5, bias=torch.zeros(3)),
        lambda: trained(5, bias=torch.tensor([3.0, float("nan")])),
        lambda: RecordDict({"model": ArrayRecord(THETA)}),
        lambda: RecordDict({"model": ArrayRecord(THETA), "n": MetricRecord({"num-examples": 1.5})}),
        lambda: RecordDict({"n": MetricRecord({"num-examples": 1})}),
    ],
    ids=["name", "shape", "not finite", "no examples", "part of an example", "no arrays"],
)
def test_a_reply_that_cannot_be_masked_does_not_leave(content: Callable[[], RecordDict]) -> None:
    nodes = Nodes(lambda message, context: content())
    question = asked_to_mask(nodes)[5]
    with pytest.raises(ValueError, match="reply|finite|ArrayRecord"):
        nodes.ask(5, question, arrays=True)
    with pytest.raises(Refused):
        nodes.ask(5, question, arrays=True)


@pytest.mark.parametrize("wrong", [{"step": "Advertise"}, {"terms": "mine"}, {"session": "text"}, {"step": 1}])
def test_a_question_that_is_no_step_under_the_terms_claims_nothing(tmp_path: Path, wrong: Record) -> None:
    mod, question = secure_sum(TERMS, claims=tmp_path / "sums"), next(TERMS.rounds(CLIENTS, 6))[5]
    context = Context(1, 5, {}, RecordDict(), {})
    for asked in ({**question, **wrong}, {k: v for k, v in question.items() if k not in wrong}):
        with pytest.raises(Refused):
            mod(Message(to_config_record(asked), dst_node_id=5, message_type="train"), context, pytest.fail)
    assert not (tmp_path / "sums").exists()
    mod(Message(to_config_record(question), dst_node_id=5, message_type="train"), context, pytest.fail)
    assert len(list((tmp_path / "sums").iterdir())) == 1


def test_an_array_that_claims_more_than_came_takes_no_memory() -> None:
    claims = io.BytesIO()
    np.lib.format.write_array_header_1_0(claims, {"descr": "<u4", "fortran_order": False, "shape": (3 * 10**9,)})
    vector = Array("uint32", (3,), "numpy.ndarray", claims.getvalue() + bytes(64))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="12000000000"):
            read(RecordDict({ARRAYS: ArrayRecord({"masked": vector})}))
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------- the ideal one of simulations

SGD = {"use": "local_sgd", "rate": 0.1}
EIGHT = {"clients": 8, "data": {"batch_size": 2, "auxiliary": 64}, "model": {"use": "mlp", "hidden": [8]}}
CHAINS = {
    "one step": [SGD],
    "two steps": [SGD | {"steps": 2}],
    "slices": [SGD | {"steps": 2, "batch_size": 1}],
    "clipped": [{"use": "clip", "max_norm": 0.1}, SGD],
    "clipped one by one": [{"use": "clip", "max_norm": 0.1, "each": True}, SGD],
    "clipped afterwards": [SGD, {"use": "clip", "max_norm": 0.01}],
    "pruned": [SGD, {"use": "prune", "keep": 0.2}],
    "identity": [{"use": "identity"}, SGD],
}
BATCHNORM = {"use": "convnet", "width": 1, "norm": "batch", "mode": "train"}
MakeFederation = Callable[..., Federation]


def apart_and_together(make: MakeFederation, **changes: Any) -> tuple[Federation, Federation]:
    """The same federation, seen one by one and in groups of four."""
    return make(**EIGHT, **changes), make(**EIGHT, **changes, secure_sum={"group": 4})


@pytest.mark.parametrize("chain", [*CHAINS.values(), [SGD, {"use": "gaussian", "sigma": 0.1}]], ids=str)
def test_what_is_seen_of_a_group_is_the_mean_of_its_clients(make_federation: MakeFederation, chain: Any) -> None:
    """Noise included, each with its own."""
    alone, together = apart_and_together(make_federation, chain=chain)
    params, buffers = alone.initial()
    for first in (0, 4):
        seen = together.client_update(params, buffers, first, 2)
        each = [alone.client_update(params, buffers, c, 2) for c in range(first, first + 4)]
        for k, t in seen.items():
            torch.testing.assert_close(t, torch.stack([u[k] for u in each]).mean(0), rtol=0, atol=1e-7)
        batches = [alone.batch_at(c, 2) for c in range(first, first + 4)]
        assert torch.equal(together.batch_at(first, 2).x, torch.cat([b.x for b in batches]))
        assert torch.equal(together.batch_at(first, 2).y, torch.cat([b.y for b in batches]))
        assert torch.equal(
            together.rows_at(first, 2), torch.cat([alone.shards.rows_at(c, 2) for c in range(first, first + 4)])
        )
    own = together.own_update(params, buffers, 5, 2)
    assert all(torch.equal(t, own[k]) for k, t in alone.client_update(params, buffers, 5, 2).items()), (
        "a client's is its own"
    )


@pytest.mark.parametrize(
    ("model", "chain"),
    [
        *((EIGHT["model"], chain) for chain in CHAINS.values()),
        # an example alone has no batch statistics
        *((BATCHNORM, chain) for name, chain in CHAINS.items() if name != "clipped one by one"),
    ],
)
def test_the_attackers_chain_makes_of_a_groups_examples_what_is_seen(
    make_federation: MakeFederation, model: Any, chain: Any
) -> None:
    fed = make_federation(**(EIGHT | {"model": model}), chain=chain, secure_sum={"group": 4})
    params, buffers = fed.initial()
    fed.load_buffers(buffers)
    expected = fed.as_seen(fed.chain, 4).mean(fed.gradient)(params, fed.batch_at(4, 1), None)
    for k, t in fed.client_update(params, buffers, 4, 1).items():
        torch.testing.assert_close(expected[k], t, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("noise", [{"use": "gaussian", "sigma": 0.3}, {"use": "laplace", "scale": 0.3}])
def test_noise_averages_out_as_the_attacker_is_reported(make_federation: MakeFederation, noise: Any) -> None:
    bare, noisy = (make_federation(**EIGHT, chain=c, secure_sum={"group": 4}) for c in ([SGD], [SGD, noise]))
    params, buffers = bare.initial()
    difference = [
        noisy.client_update(params, buffers, 0, 1)[k] - t for k, t in bare.client_update(params, buffers, 0, 1).items()
    ]
    update_distribution = noisy.as_seen(noisy.chain, 4).update_distribution
    assert update_distribution is not None
    assert update_distribution.scale == 0
    assert float(torch.cat([d.flatten() for d in difference]).std()) == pytest.approx(
        update_distribution.sigma, rel=0.03
    )


@pytest.mark.parametrize("last", ["sign", "prune", "mask"])
def test_sums_of_signs_and_of_masked_entries_have_no_closed_form(make_federation: MakeFederation, last: str) -> None:
    keep = {} if last.endswith("sign") else {"keep": 0.5}
    fed = make_federation(**EIGHT, chain=[SGD, {"use": last, **keep}], secure_sum={"group": 4})
    assert fed.chain.update_distribution is not None
    assert fed.as_seen(fed.chain, 4).update_distribution is None
    noise = {"use": "gaussian", "sigma": 0.3}
    noisy = make_federation(**EIGHT, chain=[SGD, noise, {"use": last, **keep}], secure_sum={"group": 4})
    plan = plan_of([{"use": "inverting_gradients"}], {}, noisy)
    assert not [p for p in plan.attacks if p.role in LIMITS or p.tune != "off"], "no limit, and nothing to tune to"


def test_groups_are_of_consecutive_clients(make_federation: MakeFederation) -> None:
    fixed = make_federation(**EIGHT, secure_sum={"group": 4}).protocol
    assert fixed.groups == [range(4), range(4, 8)] and fixed.group(6) == range(4, 8) and fixed.group(8) == range(8, 9)
    assert make_federation(**EIGHT).protocol.groups == [range(c, c + 1) for c in range(8)]


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ({"group": 3}, "group"),
        ({"group": 4, "clip": 0.0}, "clip"),
        ({"group": 1}, "group"),
        ({"group": 4, "threshold": 2}, "threshold"),
        ({"group": 4, "threshold": 5}, "threshold"),
        ({"grup": 4}, "grup"),
        ({"group": 2.5}, "group"),
        ({}, "group"),
    ],
)
def test_an_impossible_secure_sum_is_refused(tables: Callable[..., Any], table: Any, name: str) -> None:
    with pytest.raises(SpecError, match=rf"\[secure_sum\]: .*{name}"):
        Protocol.from_tables(tables(**EIGHT, secure_sum=table))


def test_the_protocol_travels_with_its_secure_sum(make_federation: MakeFederation) -> None:
    protocol = make_federation(**EIGHT, secure_sum={"group": 4, "threshold": 3}).protocol
    assert Protocol.from_json(protocol.to_json()) == protocol
    assert "secure_sum" not in make_federation(**EIGHT).protocol.to_json()
