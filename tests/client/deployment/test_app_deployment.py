"""The ClientApp in a deployment: it does what its owner's file says, and what it says is all that leaves."""

import io
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from fedgauge.client import app as module
from fedgauge.client.app import FAILED, NOT_GRADED, REFUSED, app
from fedgauge.client.deployment.self_grading import NOT_ALLOWED
from fedgauge.client.deployment.state_folder import ClientFolder
from fedgauge.client.federation import Federation
from fedgauge.client.inspection.policy import REASON, WITHHELD
from fedgauge.client.protocol import Protocol
from fedgauge.client.psnr import match, psnr_of
from tests.tensors import identical
from tests.wire import travel

pytestmark = pytest.mark.usefixtures("identity")

NODE = 0xFEDCBA9876543210
DATA = {"use": "mnist5k", "batch_size": 4, "auxiliary": 64}
MLP = {"use": "mlp", "hidden": [8]}
BATCHNORM = {"use": "convnet", "width": 1, "norm": "batch", "mode": "train"}
SGD = {"use": "local_sgd", "rate": 0.1}
GAUSSIAN = {"use": "gaussian", "sigma": 0.01}
AGREED = {**DATA, "sampling": "agreed"}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """An owner's file; each client has a folder of its own."""

    def make(client: int = 1, **changes: Any) -> Path:
        tables = {"client": client, "data": AGREED, "chain": [SGD], "grading": {"mode": "scores"}, **changes}
        (tmp_path / str(client)).mkdir(exist_ok=True)
        path = tmp_path / str(client) / "client.toml"
        path.write_text(tomli_w.dumps(tables))
        return path

    return make


def protocol(**changes: Any) -> Protocol:
    tables = {"seed": 3, "rounds": 5, "clients": 3, "data": DATA, "model": MLP, "chain": [SGD]}
    return Protocol.from_tables(tables | changes)


def context(path: Path, agreed: Protocol | None = None, run: int = 1) -> Context:
    config = {"client": str(path), "partition-id": 2}  # what a server's side says of the node does not count
    return Context(run, NODE, config, RecordDict(), {"protocol": (agreed or protocol()).to_json()})


def ask(round: int = 1, agreed: Protocol | None = None, **config: Any) -> Message:
    """A server's training message with the federation's first weights."""
    params, floating = Federation(agreed or protocol()).initial()
    content = RecordDict({"arrays": ArrayRecord(params), "config": ConfigRecord({"server-round": round, **config})})
    if floating:
        content["buffers"] = ArrayRecord(floating)
    return travel(Message(content, dst_node_id=NODE, message_type="train"))


def question(images: dict[str, Tensor] | ArrayRecord, round: int = 1) -> Message:
    record = images if isinstance(images, ArrayRecord) else ArrayRecord(images)
    content = RecordDict({"images": record, "grade": ConfigRecord({"server-round": round})})
    return travel(Message(content, dst_node_id=NODE, message_type="query.grade"))


def tensors(message: Message, name: str = "update") -> dict[str, Tensor]:
    return dict(message.content.array_records[name].to_torch_state_dict())


def error(reply: Message) -> tuple[int, str]:
    assert reply.has_error() and not reply.has_content()
    return reply.error.code, reply.error.reason


def log(path: Path) -> list[dict[str, Any]]:
    text = ClientFolder(path.parent / "state").log.read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_without_noise_and_with_agreed_sampling_the_update_is_the_simulations(write: Write) -> None:
    where = context(write())
    for round in (1, 2):
        reply = travel(app(ask(round), where))
        fed = Federation(protocol())
        assert identical(tensors(reply), fed.own_update(*fed.initial(), 1, round))
        assert sorted(reply.content) == ["metrics", "update"], "nothing else leaves the client"
        assert dict(reply.content.metric_records["metrics"]) == {"num-examples": 4}


def test_a_server_that_asks_for_a_weaker_chain_gets_the_owners(write: Write) -> None:
    strict = [{"use": "clip", "max_norm": 0.01, "each": True}, SGD]
    loss = {"use": "mean_squared_error"}
    weak = protocol(chain=[{**SGD, "rate": 5.0}], data={**DATA, "batch_size": 1}, loss=loss)
    update = tensors(app(ask(1, weak), context(write(chain=strict), weak)))
    defended = Federation(protocol(chain=strict))
    assert identical(update, defended.own_update(*defended.initial(), 1, 1))


def test_noise_is_each_clients_and_each_runs_own(write: Write) -> None:
    noisy = protocol(chain=[SGD, GAUSSIAN])
    clean = Federation(protocol())
    noises = []
    for client, run in ((0, 1), (1, 1), (0, 2), (1, 2)):
        update = tensors(app(ask(1, noisy), context(write(client, chain=[SGD, GAUSSIAN]), noisy, run)))
        bare = clean.own_update(*clean.initial(), client, 1)
        noises.append(torch.cat([(update[k] - bare[k]).flatten() for k in bare]))
    fed = Federation(noisy)
    simulated = fed.own_update(*fed.initial(), 0, 1)
    bare = clean.own_update(*clean.initial(), 0, 1)
    noises.append(torch.cat([(simulated[k] - bare[k]).flatten() for k in bare]))  # by the protocol's seed
    correlation = torch.corrcoef(torch.stack(noises))
    entries = len(noises[0])
    assert entries == 784 * 8 + 8 + 8 * 10 + 10
    assert all(abs(float(n.std()) / 0.01 - 1) < 0.05 for n in noises)
    off = correlation - torch.eye(5)
    assert float(off.abs().max()) < 6 / entries**0.5, "independent of each other, and of what the seed gives"


def test_secret_sampling_trains_on_other_rows_in_each_run(write: Write) -> None:
    path = write(data=DATA)
    drawn = []
    for run in (1, 2, 3):
        assert not app(ask(1), context(path, run=run)).has_error()
        found = ClientFolder(path.parent / "state").drawn(run, 1)
        assert found is not None and found.run == run
        drawn.append(found.rows)
    fed = Federation(protocol())
    agreed = tuple(fed.rows_at(1, 1).tolist())
    assert len({*drawn, agreed}) == 4
    assert {row for rows in drawn for row in rows} <= set(fed.shards.indices[1].tolist()), "of its own examples"


# -------------------------------------------------------------------------------------------------- what is not done for a server


def test_a_round_is_answered_once_a_run(write: Write) -> None:
    """Asked again and again, a server would average the noise away."""
    path = write(chain=[SGD, GAUSSIAN])
    where = context(path)
    assert not app(ask(2), where).has_error()
    assert error(app(ask(2), where))[0] == error(app(ask(2), context(path)))[0] == REFUSED
    assert not app(ask(3), where).has_error()
    assert not app(ask(2), context(path, run=2)).has_error(), "a run that was resumed has another number"


def test_an_owner_bounds_what_all_runs_together_get(write: Write) -> None:
    """Another run asks for the same rounds again, and its noise would be averaged with the last one's."""
    path = write(chain=[SGD, GAUSSIAN], updates=2)
    assert not app(ask(1), context(path)).has_error()
    assert not app(ask(1), context(path, run=2)).has_error()
    for run, round in ((3, 1), (1, 2)):
        assert error(app(ask(round), context(path, run=run)))[0] == REFUSED


@pytest.mark.parametrize("round", [0, -1, 6, 2**40])
def test_a_round_beyond_the_protocols_is_refused(write: Write, round: int) -> None:
    assert error(app(ask(round), context(write())))[0] == REFUSED


def test_a_proximal_term_that_the_owner_does_not_apply_is_refused(write: Write) -> None:
    reply = app(ask(1, **{"proximal-mu": 0.5}), context(write()))
    assert error(reply)[0] == REFUSED


def raw(shape: tuple[int, ...], kind: str, data: bytes) -> Array:
    """An array whose header promises what its bytes need not hold."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": kind, "fortran_order": False, "shape": shape})
    return Array(dtype=kind, shape=shape, stype="numpy.ndarray", data=header.getvalue() + data)


def pickled() -> Array:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)  # written to be refused
    return Array(dtype="object", shape=(1,), stype="numpy.ndarray", data=file.getvalue())


HOSTILE = {
    "a name less": lambda r: r.pop("1.bias"),
    "a name more": lambda r: r.update({"extra": raw((1,), "<f4", bytes(4))}),
    "another shape": lambda r: r.update({"1.bias": raw((1,), "<f4", bytes(4))}),
    "a thousand million": lambda r: r.update({"1.bias": raw((10**9,), "<f4", b"")}),
    "doubles": lambda r: r.update({"1.bias": raw((8,), "<f8", bytes(64))}),
    "a pickle": lambda r: r.update({"1.bias": pickled()}),
    "not finite": lambda r: r.update({"1.bias": raw((8,), "<f4", np.full(8, np.nan, "<f4").tobytes())}),
}


@pytest.mark.parametrize("spoil", HOSTILE.values(), ids=HOSTILE)
def test_weights_that_are_not_the_models_are_refused_before_memory_is_taken(
    write: Write, spoil: Callable[[ArrayRecord], None]
) -> None:
    path, message = write(), ask(1)
    assert not app(ask(2), context(path)).has_error()  # what is built and kept is not counted
    spoil(message.content.array_records["arrays"])
    tracemalloc.start()
    code, reason = error(app(message, context(path)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert code == REFUSED and reason
    assert peak < 20_000_000
    assert log(path)[-1]["event"] == "refused"
    assert ClientFolder(path.parent / "state").drawn(1, 1) is None, "nothing was drawn for it"


def test_batchnorm_statistics_travel_as_in_a_simulation(write: Write) -> None:
    agreed = protocol(model=BATCHNORM)
    reply = app(ask(1, agreed), context(write(), agreed))
    fed = Federation(agreed)
    params, buffers = fed.initial()
    update = fed.own_update(params, buffers, 1, 1)
    assert identical(tensors(reply), update)
    moved = {k: b for k, b in fed.model.named_buffers() if b.is_floating_point()}
    assert identical(tensors(reply, "buffers"), moved)


def test_nothing_of_an_exception_leaves(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write(data={"use": "mnist5k", "batch_size": 4, "pixels": "secret-of-mine"})
    told = error(app(ask(1), context(path)))
    assert told[0] == FAILED and "secret" not in told[1] and "pixels" not in told[1]
    assert "secret-of-mine" in caplog.text or "pixels" in caplog.text, "its owner sees it"
    assert log(path)[-1]["event"] == "failed" and "client.toml" in log(path)[-1]["reason"]
    missing = context(path.parent / "nothing-there.toml")
    assert error(app(ask(1), missing)) == told, "the same words whatever went wrong"


# ---------------------------------------------------------------------------------------------------------------- grading


def trained(path: Path, round: int = 1, run: int = 1) -> Tensor:
    """What the client trains on in a round that it has answered, read as only its owner can."""
    assert not app(ask(round), context(path, run=run)).has_error()
    drawn = ClientFolder(path.parent / "state").drawn(1, round)
    assert drawn is not None
    return torch.stack([Federation(protocol()).shards.dataset.x[row] for row in drawn.rows]).float() / 255


def near(x: Tensor, by: float) -> Tensor:
    return (x + by * torch.rand(x.shape, generator=torch.Generator().manual_seed(1))).clamp(0, 1)


def test_scores_come_back_and_nothing_else(write: Write) -> None:
    path = write(data=DATA)
    x = trained(path)
    guess = near(x, 0.5)[[2, 0, 3, 1]]
    reply = travel(app(question({"dlg": guess}), context(path)))
    told = reply.content.metric_records["psnr"]["dlg"]
    exact = psnr_of(guess, x[match(guess, x)])
    assert torch.tensor(told).sub(exact).abs().max() <= 0.25 + 1e-6
    assert all(v * 2 == round(v * 2) for v in told)
    assert sorted(reply.content) == ["grading", "psnr", "refused"]
    assert dict(reply.content.config_records["grading"]) == {"precision": 0.5}
    assert dict(reply.content.config_records["refused"]) == {}


def test_an_owner_who_says_nothing_answers_nothing(write: Write) -> None:
    path = write(grading={})
    x = trained(path)
    assert error(app(question({"dlg": x}), context(path))) == (NOT_GRADED, NOT_ALLOWED)
    assert (log(path)[-1]["event"], log(path)[-1]["what"]) == ("refused", "grade")


def test_neither_a_restart_nor_a_new_run_gives_more_answers(write: Write) -> None:
    path = write(grading={"mode": "scores", "queries": 2})
    x = trained(path)
    for name in ("a", "b"):
        assert app(question({name: near(x, 0.3)}), context(path)).content.metric_records["psnr"]
    module._own.cache_clear()
    for run in (1, 2):  # agreed sampling draws the same batch again
        if run == 2:
            assert torch.equal(trained(path, run=2), x)
        reply = app(question({"c": near(x, 0.4)}), context(path, run=run))
        assert dict(reply.content.metric_records["psnr"]) == {}
        assert set(reply.content.config_records["refused"]) == {"c"}


@pytest.mark.parametrize(
    "array",
    [
        raw((10**9, 1, 28, 28), "<f4", b""),
        raw((5, 1, 28, 28), "<f4", bytes(4 * 5 * 784)),
        pickled(),
    ],
    ids=["huge", "five", "pickle"],
)
def test_images_that_are_none_are_refused_before_memory_is_taken(write: Write, array: Array) -> None:
    path = write()
    trained(path)
    tracemalloc.start()
    code, _ = error(app(question(ArrayRecord({"dlg": array})), context(path)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert code == NOT_GRADED
    assert "dlg" in log(path)[-1]["reason"]  # which only the owner reads
    assert peak < 60_000_000  # the owner's images are read


def test_a_simulation_does_not_grade_at_its_clients() -> None:
    where = Context(1, NODE, {"partition-id": 0}, RecordDict(), {"protocol": protocol().to_json()})
    reply = app(question({"dlg": torch.zeros(4, 1, 28, 28)}), where)
    assert error(reply)[0] == NOT_GRADED


# ------------------------------------------------------------------------------------------------------------------ guard


def test_an_update_above_the_owners_norm_stays(write: Write) -> None:
    path = write(guard={"max_norm": 1e-6})
    assert error(app(ask(1), context(path))) == (WITHHELD, REASON)
    assert log(path)[-1]["event"] == "withheld" and "above max_norm 1e-06" in log(path)[-1]["cause"]
    assert error(app(ask(1), context(path)))[0] == REFUSED, "nor is it tried again until one passes"
    free = write(0, guard={"max_norm": 1e6})
    assert not app(ask(1), context(free)).has_error()
