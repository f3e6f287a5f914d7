"""The ClientApp: a message in, the protocol's update out."""

from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from fedgauge.client.app import app
from fedgauge.client.federation import Federation, federation
from fedgauge.client.protocol import Protocol
from tests.tensors import identical
from tests.wire import travel

pytestmark = pytest.mark.usefixtures("identity")

NODE = 0xFEDCBA9876543210
DATA = {"use": "mnist5k", "batch_size": 4, "auxiliary": 64}
MLP = {"use": "mlp", "hidden": [8]}
BATCHNORM = {"use": "convnet", "width": 1, "norm": "batch", "mode": "train"}
SGD = {"use": "local_sgd", "rate": 0.1}
NOISY = [SGD, {"use": "gaussian", "sigma": 0.01}]


def protocol(**changes: Any) -> Protocol:
    tables = {"seed": 3, "rounds": 5, "clients": 3, "data": DATA, "model": MLP, "chain": [SGD]}
    return Protocol.from_tables(tables | changes)


def context(agreed: Protocol, client: int) -> Context:
    return Context(1, NODE, {"partition-id": client, "num-partitions": 3}, RecordDict(), {"protocol": agreed.to_json()})


def ask(agreed: Protocol, round: int = 1, buffers: bool = True, **config: Any) -> Message:
    """A server's training message with the federation's first weights."""
    params, floating = Federation(agreed).initial()
    content = RecordDict({"arrays": ArrayRecord(params), "config": ConfigRecord({"server-round": round, **config})})
    if buffers and floating:
        content["buffers"] = ArrayRecord(floating)
    return travel(Message(content, dst_node_id=NODE, message_type="train"))


def tensors(message: Message, name: str = "update") -> dict[str, Tensor]:
    return dict(message.content.array_records[name].to_torch_state_dict())


@pytest.mark.parametrize("chain", [[SGD], NOISY], ids=["bare", "noisy"])
def test_the_reply_is_the_federations_update_bit_for_bit(chain: list[dict[str, Any]]) -> None:
    agreed = protocol(chain=chain)
    reply = travel(app(ask(agreed, round=2), context(agreed, 1)))
    truth = Federation(agreed)
    params, buffers = truth.initial()
    assert identical(tensors(reply), truth.client_update(params, buffers, 1, 2))
    assert list(tensors(reply)) == list(params)
    assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 4}
    assert reply.metadata.src_node_id == NODE
    assert sorted(reply.content) == ["metrics", "update"], "nothing else leaves the client"


def test_clients_rounds_and_seeds_give_different_updates() -> None:
    agreed, other = protocol(chain=NOISY), protocol(chain=NOISY, seed=4)
    answers = [
        tensors(app(ask(p, round), context(p, client)))
        for p, round, client in ((agreed, 1, 0), (agreed, 1, 1), (agreed, 2, 0), (other, 1, 0))
    ]
    for i, a in enumerate(answers):
        assert not any(identical(a, b) for b in answers[:i])


def test_a_guard_says_the_same_whatever_the_examples_are() -> None:
    agreed = protocol(guard={"inspect": "log"})
    answers = [app(ask(agreed), context(agreed, client)) for client in (0, 1)]  # the same weights, other examples
    first, second = (answer.content.config_records["guard"] for answer in answers)
    assert dict(first) == dict(second)


def test_batchnorm_statistics_come_from_the_server_and_go_back_apart() -> None:
    agreed = protocol(model=BATCHNORM)
    message = ask(agreed)
    sent = tensors(message, "buffers")
    moved = {k: t + 0.5 for k, t in sent.items()}
    first = app(message, context(agreed, 0))
    message.content["buffers"] = ArrayRecord(moved)
    second = app(message, context(agreed, 0))
    assert tensors(first, "buffers").keys() == sent.keys()
    assert not any("running" in name for name in tensors(first))
    for name in sent:  # momentum 0.1: nine tenths of what was sent, and the same tenth of what was seen
        difference = tensors(second, "buffers")[name] - tensors(first, "buffers")[name]
        torch.testing.assert_close(difference, torch.full_like(difference, 0.45), rtol=1e-4, atol=1e-5)


def test_batchnorm_statistics_of_one_client_do_not_leak_into_the_next() -> None:
    """One process serves many clients of a simulation with one model."""
    agreed = protocol(model=BATCHNORM)
    federation.cache_clear()
    alone = app(ask(agreed), context(agreed, 1))
    app(ask(agreed), context(agreed, 0))
    after = app(ask(agreed), context(agreed, 1))
    assert identical(tensors(alone, "buffers"), tensors(after, "buffers"))
    assert identical(tensors(alone), tensors(after))


@pytest.mark.parametrize("client", [0, 2])
def test_a_node_says_which_client_it_is(client: int) -> None:
    question = travel(Message(RecordDict(), dst_node_id=NODE, message_type="query"))
    answer = travel(app(question, context(protocol(), client)))
    assert dict(answer.content.metric_records["who"]) == {"client": client}
