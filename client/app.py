"""The Flower ClientApp: a message becomes a call of the client function, its update becomes the reply.

Where the node's configuration names an owner's file (client = "/path/client.toml") it is a client of a deployment, and does
what that file says; else it is one of a simulation, which `partition-id` numbers.
"""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial, wraps
from pathlib import Path
from typing import cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedgauge.client.arrays import npy_header
from fedgauge.client.deployment.deployed_client import DeployedClient, self_audit
from fedgauge.client.deployment.grading import batch_to_grade
from fedgauge.client.deployment.grading import grade as grade_images
from fedgauge.client.deployment.guard import WITHHELD, UpdatePolicy, guard_memory, inspect_message, withheld
from fedgauge.client.deployment.owner import GuardPolicy, OwnerConfig
from fedgauge.client.deployment.state_folder import ClientFolder, DrawnBatch, digest_of
from fedgauge.client.deployment.terms import RequestRefused, ServerTerms
from fedgauge.client.federation import Federation, federation
from fedgauge.client.inspection.policy import REASON
from fedgauge.client.models.vision import detached_params, floating_buffers
from fedgauge.client.rng import generator
from fedgauge.client.update import Params, Update

STRAGGLED = 100  # error codes of our own: the client was too late by the scenario's wish
REFUSED = 110  # it does not do what the server asks for, and says why
FAILED = 113  # it could not, and only its owner is told why
NOT_GRADED = 112
_HEADER = 128  # bytes that NumPy puts before an array of few dimensions
_TOLD = "the client failed; its own log says why"

app = ClientApp()
Handler = Callable[[Message, Context], Message]


def _mine(context: Context) -> tuple[Federation, int]:
    """The federation as the protocol describes it, and which client of it this node is."""
    torch.set_num_threads(1)  # one thread a client: equal seeds give equal bits
    return federation(str(context.run_config["protocol"])), int(context.node_config["partition-id"])


def _of_a_deployment(context: Context) -> bool:
    return "client" in context.node_config


def _private(handler: Handler) -> Handler:
    """In a deployment nothing of an exception leaves the client but what was written for the server: its words name files."""

    @wraps(handler)
    def told(message: Message, context: Context) -> Message:
        if not _of_a_deployment(context):
            return handler(message, context)
        try:
            return handler(message, context)
        except RequestRefused as reason:
            return Message(Error(REFUSED, str(reason)), reply_to=message)
        except Exception:  # Flower would send its words to the server
            logging.getLogger("fedgauge").exception("fedgauge: a question of the server's was not answered")
            return Message(Error(FAILED, _TOLD), reply_to=message)

    return told


@app.query()
@_private
def introduce(message: Message, context: Context) -> Message:
    """Say which client this node is; node ids are drawn anew in every run."""
    number = _owner(context).client if _of_a_deployment(context) else int(context.node_config["partition-id"])
    return Message(RecordDict({"who": MetricRecord({"client": number})}), reply_to=message)


@app.train()
@_private
def train(message: Message, context: Context) -> Message:
    """Take the weights, draw this round's batch, answer with the update."""
    if _of_a_deployment(context):
        return _train_own(message, context)
    fed, client = _mine(context)
    config = cast(dict[str, int | float], message.content.config_records["config"])
    round = int(config["server-round"])
    if fed.protocol.misses(client, round):
        return Message(Error(STRAGGLED, "straggler: too late by the scenario's [stragglers]"), reply_to=message)
    agreed = fed.chain.local.proximal_mu
    if config.get("proximal-mu", agreed) != agreed:
        raise ValueError(f"the server asks for proximal-mu {config['proximal-mu']}, the protocol says {agreed}")
    params = message.content.array_records["arrays"].to_torch_state_dict()
    expected = {name: p.shape for name, p in fed.model.named_parameters()}
    if {name: p.shape for name, p in params.items()} != expected:  # the model would fill in its own, or broadcast
        raise ValueError(
            f"the server's weights {sorted(params)} are not the model's {sorted(expected)}, or their shapes"
        )
    buffers = message.content.array_records.get("buffers", ArrayRecord()).to_torch_state_dict()
    told: list[str] = []
    with guard_memory(context.state) as met:
        rows = fed.shards.rows_at(client, round)
        rng = generator(fed.protocol.seed, "inspection", client, round)
        why = inspect_message(fed.protocol.guard, fed, client, round, rows, (params, buffers), met, told.append, rng)
    if why:  # nothing of a simulation is secret: the run records what the owner alone would be told
        return Message(Error(WITHHELD, f"{REASON}: {why}"), reply_to=message)
    memory = context.state.array_records.get("memory", ArrayRecord()).to_torch_state_dict()
    update = fed.own_update(dict(params), buffers, client, round, memory)
    _remember(context, memory)
    reply = _reply(message, fed, update, bool(buffers))
    if told:
        reply.content["guard"] = ConfigRecord({"found": told[0]})
    return reply


def _remember(context: Context, memory: dict[str, Tensor]) -> None:
    if memory:
        context.state["memory"] = ArrayRecord(_contiguous(memory))


def _reply(message: Message, fed: Federation, update: Update, buffers: bool) -> Message:
    content = RecordDict(
        {
            "update": ArrayRecord(_contiguous(update)),
            "metrics": MetricRecord({"num-examples": fed.shards.batch_size}),
        }
    )
    if (
        fed.model.training and buffers
    ):  # BatchNorm in train mode moved its statistics; they travel apart, to be averaged
        content["buffers"] = ArrayRecord(_contiguous(floating_buffers(fed.model)))
    return Message(content, reply_to=message)


def _contiguous(update: Update) -> dict[str, torch.Tensor]:
    return {k: t.detach().contiguous() for k, t in update.items()}


# -------------------------------------------------------------------------------------------------------- a deployment


def _owner(context: Context) -> OwnerConfig:
    return OwnerConfig.load(Path(str(context.node_config["client"])))


@lru_cache(maxsize=2)
def _own(path: Path, text: str, protocol: str) -> DeployedClient:
    """Built anew where the owner has changed the file."""
    return DeployedClient.of(OwnerConfig.parse(text, path), ServerTerms.parse(protocol))


def _train_own(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    path = Path(str(context.node_config["client"]))
    state = ClientFolder(OwnerConfig.load(path).state)
    try:
        protocol = str(context.run_config["protocol"])
        own = _own(path, path.read_text(), protocol)
        with state.held():
            if state.protocol() != protocol:
                state.keep_protocol(protocol)
            return _answer_with_update(message, context, own, state)
    except RequestRefused as reason:
        state.note("refused", run=context.run_id, what="train", reason=str(reason))
        raise
    except Exception as error:
        state.note("failed", run=context.run_id, what="train", reason=f"{type(error).__name__}: {error}")
        raise


def _answer_with_update(message: Message, context: Context, own: DeployedClient, state: ClientFolder) -> Message:
    round = _round_of(message, "config", own.protocol.rounds)
    if state.drawn(context.run_id, round) is not None:  # with fresh noise each time, a server would average it away
        raise RequestRefused(f"this client has answered in round {round} of this run")
    if own.owner.updates is not None and state.draws() >= own.owner.updates:  # a new run asks for the same rounds again
        raise RequestRefused("this client has given as many updates as its owner allows")
    mu, agreed = message.content.config_records["config"].get("proximal-mu"), own.chain.local.proximal_mu
    if mu not in (None, agreed):
        raise RequestRefused("the server asks for another proximal-mu than this client applies")
    params, buffers = _sent(message, own)
    memory = dict(context.state.array_records.get("memory", ArrayRecord()).to_torch_state_dict())
    rows = own.draw(round)
    batch = own.owner.batch(rows)
    drawn = DrawnBatch(context.run_id, tuple(rows), digest_of(batch))
    state.keep_drawn(round, drawn)  # whatever becomes of it, it is not computed again
    if suspicious := _suspicious(own, params, buffers, round, rows, context.run_id, state):
        state.note("withheld", run=context.run_id, round=round, cause=suspicious)
        return withheld(message)
    update = own.compute(params, buffers, batch, memory)
    reply = _reply(message, own, update, bool(buffers))  # before the audit, which uses the same model
    with own.owner.allowing():  # an audit of the owner's own is found there
        objection = _objection(own, params, buffers, update, reply, rows)
    if objection:
        state.note("withheld", run=context.run_id, round=round, cause=objection)
        return withheld(message)
    state.keep_drawn(round, replace(drawn, sent=True))
    _remember(context, memory)  # of what is not sent nothing is remembered as sent
    state.note("sent", run=context.run_id, round=round, examples=len(rows))
    return reply


def _suspicious(
    own: DeployedClient,
    params: Params,
    buffers: Mapping[str, Tensor],
    round: int,
    rows: list[int],
    run: int,
    state: ClientFolder,
) -> str:
    """Why the owner's guard answers nothing to weights as these; empty without one, and where it only takes note."""
    if own.owner.guard is None or own.owner.guard.inspection_policy.inspect == "off":
        return ""

    def note(words: str) -> None:
        state.note("inspected", run=run, round=round, found=words)

    with state.met(run) as met:
        weights, chosen = (params, buffers), torch.tensor(rows)
        return inspect_message(
            own.owner.guard.inspection_policy, own, own.owner.client, round, chosen, weights, met, note
        )


def _objection(
    own: DeployedClient, params: Params, buffers: Mapping[str, Tensor], update: Update, reply: Message, rows: list[int]
) -> str:
    """Why the owner's guard lets nothing out; empty without one, and where it finds nothing."""
    limits: GuardPolicy | None = own.owner.guard
    if limits is None:
        return ""
    moved = reply.content.array_records.get("buffers", ArrayRecord()).to_torch_state_dict()
    inversion = self_audit(limits)
    audit = None
    if inversion is not None:
        audit = partial(inversion.leak, own, params, buffers, update, own.owner.batch(rows))
    return UpdatePolicy().objection(moved) or UpdatePolicy(limits.max_norm, limits.threshold).objection(update, audit)


@app.query("grade")
@_private
def grade(message: Message, context: Context) -> Message:
    """Score the server's reconstructions of a round against what was trained on; numbers alone leave."""
    if not _of_a_deployment(context):
        return Message(Error(NOT_GRADED, "a simulation's server grades by itself"), reply_to=message)
    owner = _owner(context)
    state = ClientFolder(owner.state)
    try:
        round = _round_of(message, "grade", 2**31)
        with state.held():
            run = _run_of(message, context)
            batch = batch_to_grade(owner, state, run, round)
            records = message.content.array_records.get("images", ArrayRecord())
            images = {name: _tensor(name, array, batch.x.shape) for name, array in records.items()}
            answer = grade_images(owner.grading, state, round, batch, images, run)
    except RequestRefused as reason:
        state.note("refused", run=context.run_id, what="grade", reason=str(reason))
        return Message(Error(NOT_GRADED, str(reason)), reply_to=message)
    content = RecordDict({"psnr": MetricRecord({name: list(values) for name, values in answer.psnr.items()})})
    content["refused"] = ConfigRecord(dict(answer.refused))
    content["grading"] = ConfigRecord({"precision": owner.grading.precision})
    return Message(content, reply_to=message)


def _run_of(message: Message, context: Context) -> int:
    """Flower's number of the run in which a round was trained: a training that is resumed is another run to Flower."""
    told = message.content.config_records.get("grade", ConfigRecord()).get("run", str(context.run_id))
    if not isinstance(told, str) or not told.isascii() or not told.isdecimal() or len(told) > 20:
        raise RequestRefused("run must be a number, as text")
    return int(told)


def _round_of(message: Message, record: str, most: int) -> int:
    round = message.content.config_records.get(record, ConfigRecord()).get("server-round")
    if not isinstance(round, int) or not 1 <= round <= most:
        raise RequestRefused(f"server-round must be a whole number from 1 to {most}")
    return round


def _sent(message: Message, own: DeployedClient) -> tuple[Params, dict[str, Tensor]]:
    """Weights and buffers, if they are exactly the model's."""
    records = message.content.array_records
    params = _tensors(records.get("arrays", ArrayRecord()), detached_params(own.model))
    return params, _tensors(records["buffers"], floating_buffers(own.model)) if "buffers" in records else {}


def _tensors(record: ArrayRecord, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if record.keys() != like.keys():
        raise RequestRefused("the server's weights or buffers are not called as the model's are")
    tensors = {name: _tensor(name, record[name], t.shape, t.dtype) for name, t in like.items()}
    if wrong := [name for name, t in tensors.items() if not torch.isfinite(t).all()]:
        raise RequestRefused(f"the server's {wrong[0]} has entries that are not finite")
    return tensors


def _tensor(name: str, array: Array, shape: torch.Size, dtype: torch.dtype = torch.float32) -> Tensor:
    """An array as a tensor of the expected form; what its header says is compared before memory is taken for it."""
    kind = torch.zeros((), dtype=dtype).numpy().dtype
    data = array.data
    size = math.prod(shape)
    if len(data) > size * kind.itemsize + _HEADER or array.stype != "numpy.ndarray":
        raise RequestRefused(f"{name} is no array of shape {tuple(shape)} and dtype {kind}")
    try:
        said = npy_header(data)
    except Exception as error:  # hostile bytes raise what they like
        raise RequestRefused(f"{name} cannot be decoded") from error
    if said.shape != tuple(shape) or said.dtype != kind or len(data) != said.start + size * kind.itemsize:
        raise RequestRefused(f"{name} is no array of shape {tuple(shape)} and dtype {kind}")
    flat = np.frombuffer(data, kind, size, said.start)
    array_of = flat.reshape(said.shape[::-1]).T if said.by_columns else flat.reshape(said.shape)
    return torch.from_numpy(array_of.copy())
