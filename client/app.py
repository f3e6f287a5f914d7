"""The Flower ClientApp: it calls the client function on a message and replies with the update.

If the node's configuration names an owner's file (client = "/path/client.toml"), it is a deployed client and does what that
file says; otherwise it is the client of a simulation with the number `partition-id`.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, wraps
from pathlib import Path
from typing import cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedgauge.client.deployment.deployed_client import DeployedClient, objection
from fedgauge.client.deployment.owner_file import OwnerConfig
from fedgauge.client.deployment.secure_sum import PairwiseMasking
from fedgauge.client.deployment.secure_sum_mod import RECORD as SUM
from fedgauge.client.deployment.secure_sum_mod import secure_sum
from fedgauge.client.deployment.self_grading import batch_to_grade
from fedgauge.client.deployment.self_grading import grade as grade_images
from fedgauge.client.deployment.server_terms import RequestRefused, ServerTerms
from fedgauge.client.deployment.state_folder import ClientFolder, DrawnBatch, digest_of
from fedgauge.client.federation import Federation, federation
from fedgauge.client.inspection.policy import REASON, WITHHELD
from fedgauge.client.models.vision import detached_params, floating_buffers
from fedgauge.client.mods import tensor_of, tensors_of
from fedgauge.client.rng import generator
from fedgauge.client.update import Params, Update

REFUSED = 110  # it does not do what the server asks for, and says why
FAILED = 113  # it failed, and only its owner learns why
NOT_GRADED = 112
_FAILURE = "the client failed; its own log says why"

app = ClientApp()
Handler = Callable[[Message, Context], Message]


def _of_a_deployment(context: Context) -> bool:
    return "client" in context.node_config


def _private(handler: Handler) -> Handler:
    """In a deployment only messages written for the server leave the client: an exception's text may name files."""

    @wraps(handler)
    def guarded(message: Message, context: Context) -> Message:
        if not _of_a_deployment(context):
            return handler(message, context)
        try:
            return handler(message, context)
        except RequestRefused as reason:
            return Message(Error(REFUSED, str(reason)), reply_to=message)
        except Exception:  # of any kind: its text may hold private values, and Flower would send it to the server
            logging.getLogger("fedgauge").exception("fedgauge: a request of the server failed")
            return Message(Error(FAILED, _FAILURE), reply_to=message)

    return guarded


@app.query()
@_private
def introduce(message: Message, context: Context) -> Message:
    """Report the number of this client; node ids differ from run to run."""
    number = _owner(context).client if _of_a_deployment(context) else int(context.node_config["partition-id"])
    return Message(RecordDict({"who": MetricRecord({"client": number})}), reply_to=message)


@app.train()
@_private
def train(message: Message, context: Context) -> Message:
    """Load the weights, draw this round's batch, reply with the update."""
    if _of_a_deployment(context):
        return _train_own(message, context)
    torch.set_num_threads(1)  # one thread a client: equal seeds give equal bits
    fed, client = federation(str(context.run_config["protocol"])), int(context.node_config["partition-id"])
    round = cast(int, message.content.config_records["config"]["server-round"])
    params = message.content.array_records["arrays"].to_torch_state_dict()
    buffers = message.content.array_records.get("buffers", ArrayRecord()).to_torch_state_dict()
    met, rng = _memory(context, "inspected"), generator(fed.protocol.seed, "inspection", client, round)
    guard = fed.protocol.guard
    results = guard.findings(fed.model, dict(params), round, met, rng)
    _remember(context, "inspected", met)
    # nothing in a simulation is secret: the run records what only the owner would learn
    if reasons := guard.withhold(results):
        return Message(Error(WITHHELD, f"{REASON}: {reasons}"), reply_to=message)
    memory = _memory(context, "memory")
    update = fed.own_update(dict(params), buffers, client, round, memory)
    _remember(context, "memory", memory)
    reply = _reply(message, fed, update, buffers)
    if words := guard.report(results, round):
        reply.content["guard"] = ConfigRecord({"words": words, "alarm": bool(results.alarms)})
    return reply


def _memory(context: Context, name: str) -> dict[str, Tensor]:
    return dict(context.state.array_records.get(name, ArrayRecord()).to_torch_state_dict())


def _remember(context: Context, name: str, memory: dict[str, Tensor]) -> None:
    if memory:
        context.state[name] = ArrayRecord(_contiguous(memory))


def _reply(message: Message, fed: Federation, update: Update, buffers: Mapping[str, Tensor]) -> Message:
    metrics = MetricRecord({"num-examples": fed.shards.batch_size})
    content = RecordDict({"update": ArrayRecord(_contiguous(update)), "metrics": metrics})
    if buffers and fed.sends_buffers:  # BatchNorm's statistics, which the server averages apart from the update
        content["buffers"] = ArrayRecord(_contiguous(fed.returned_buffers(buffers)))
    return Message(content, reply_to=message)


def _contiguous(update: Update) -> dict[str, torch.Tensor]:
    return {k: t.detach().contiguous() for k, t in update.items()}


def _owner(context: Context) -> OwnerConfig:
    return OwnerConfig.load(Path(str(context.node_config["client"])))


@lru_cache(maxsize=2)
def _own(path: Path, text: str, protocol: str) -> DeployedClient:
    """Cached; built again after the owner changed the file."""
    return DeployedClient.of(OwnerConfig.parse(text, path), ServerTerms.parse(protocol))


def _train_own(message: Message, context: Context) -> Message:
    torch.set_num_threads(1)
    path = Path(str(context.node_config["client"]))
    state = ClientFolder(OwnerConfig.load(path).state)
    try:
        protocol = str(context.run_config["protocol"])
        own = _own(path, path.read_text("utf-8"), protocol)
        with state.locked():
            if state.protocol() != protocol:
                state.keep_protocol(protocol)
            if own.secure_sum is not None:
                return _answer_in_a_sum(message, context, own, own.secure_sum, state)
            if SUM in message.content.config_records:
                raise RequestRefused("this client's owner has agreed to no secure sum")
            return _answer_with_update(message, context, own, state)
    except RequestRefused as reason:
        state.note("refused", run=context.run_id, what="train", reason=reason.for_owner)
        raise
    except Exception as error:
        state.note("failed", run=context.run_id, what="train", reason=f"{type(error).__name__}: {error}")
        raise


def _answer_in_a_sum(
    message: Message, context: Context, own: DeployedClient, terms: PairwiseMasking, state: ClientFolder
) -> Message:
    """One answer of a secure sum's conversation; to the third question it is the masked update."""
    if SUM not in message.content.config_records:
        raise RequestRefused("this client sends its update only in a secure sum")
    if "buffers" in message.content.array_records:
        raise RequestRefused("a secure sum takes only parameters, but the server sent buffers")
    try:
        mod = secure_sum(terms, "updates", state.sums)
        return mod(message, context, lambda asked, where: _answer_with_update(asked, where, own, state))
    except ValueError as error:  # an answer would reveal a secret, or too few clients are left
        raise RequestRefused("this client does not answer that question of its secure sum") from error


def _answer_with_update(message: Message, context: Context, own: DeployedClient, state: ClientFolder) -> Message:
    round = _round_of(message, "config", own.protocol.rounds)
    if state.drawn(context.run_id, round) is not None:  # otherwise a server could average fresh noise away
        raise RequestRefused(f"this client has already answered in round {round} of this run")
    if own.owner.updates is not None and state.draws() >= own.owner.updates:  # a new run starts again at round 1
        raise RequestRefused("this client has sent as many updates as its owner allows")
    mu, agreed = message.content.config_records["config"].get("proximal-mu"), own.chain.local.proximal_mu
    if mu not in (None, agreed):
        raise RequestRefused("the server asks for a different proximal-mu than this client applies")
    records = message.content.array_records
    with _from_the_server():
        params = tensors_of(records.get("arrays", ArrayRecord()), detached_params(own.model))
        buffers = tensors_of(records["buffers"], floating_buffers(own.model)) if "buffers" in records else {}
    memory = _memory(context, "memory")
    rows = own.draw(round)
    batch = own.owner.batch(rows)
    drawn = DrawnBatch(context.run_id, tuple(rows), digest_of(batch))
    state.keep_drawn(round, drawn)  # recorded first: this round is never computed again
    entries = sum(p.numel() for p in params.values())
    facts = {"run": context.run_id, "round": round, "entries": entries, "terms": own.terms}
    if suspicious := _suspicious(own, params, round, context.run_id, state):
        state.note("withheld", **facts, cause=suspicious)
        return Message(Error(WITHHELD, REASON), reply_to=message)
    update = own.compute(params, buffers, batch, memory)
    reply = _reply(message, own, update, buffers)
    if own.owner.guard is not None:
        moved = reply.content.array_records.get("buffers", ArrayRecord()).to_torch_state_dict()
        suspicious = objection(moved) or objection(update, own.owner.guard.max_norm)
    if suspicious:
        state.note("withheld", **facts, cause=suspicious)
        return Message(Error(WITHHELD, REASON), reply_to=message)
    state.keep_drawn(round, replace(drawn, sent=True))
    _remember(context, "memory", memory)  # only now: the state counts what was sent
    state.note("sent", **facts, examples=len(rows))
    return reply


def _suspicious(own: DeployedClient, params: Params, round: int, run: int, state: ClientFolder) -> str:
    """Return the guard's reason to refuse these weights; empty without a guard, or if it only logs."""
    guard = own.owner.guard
    if guard is None or guard.inspect == "off":
        return ""
    with state.inspection_memory(run) as met:
        results = guard.findings(own.model, params, round, met)
    if words := guard.report(results, round):
        state.note("inspected", run=run, round=round, found=words)
    return guard.withhold(results)


@app.query("grade")
@_private
def grade(message: Message, context: Context) -> Message:
    """Score the server's reconstructions of a round against the client's examples; only numbers leave."""
    if not _of_a_deployment(context):
        return Message(Error(NOT_GRADED, "the server of a simulation grades by itself"), reply_to=message)
    owner = _owner(context)
    state = ClientFolder(owner.state)
    try:
        if owner.secure_sum is not None:
            raise RequestRefused("this client sends only secure sums, and no client has all their examples")
        round = _round_of(message, "grade", 2**31)
        with state.locked():
            # for Flower, resumed training is a new run
            asked = str(message.content.config_records["grade"].get("run", context.run_id))
            if re.fullmatch(r"[0-9]{1,20}", asked) is None:
                raise RequestRefused("run must be a number, as text")
            run = int(asked)
            batch = batch_to_grade(owner, state, run, round)
            records = message.content.array_records.get("images", ArrayRecord())
            with _from_the_server():
                images = {name: tensor_of(name, array, batch.x.shape) for name, array in records.items()}
            answer = grade_images(owner.grading, state, round, batch, images, run)
    except RequestRefused as reason:
        state.note("refused", run=context.run_id, what="grade", reason=reason.for_owner)
        return Message(Error(NOT_GRADED, str(reason)), reply_to=message)
    content = RecordDict({"psnr": MetricRecord({name: list(values) for name, values in answer.psnr.items()})})
    content["refused"] = ConfigRecord(dict(answer.refused))
    content["grading"] = ConfigRecord({"precision": owner.grading.precision})
    return Message(content, reply_to=message)


def _round_of(message: Message, record: str, most: int) -> int:
    round = message.content.config_records.get(record, ConfigRecord()).get("server-round")
    if not isinstance(round, int) or not 1 <= round <= most:
        raise RequestRefused(f"server-round must be a whole number from 1 to {most}")
    return round


@contextmanager
def _from_the_server() -> Iterator[None]:
    """Refuse arrays of a message that do not fit; only the owner learns what was expected."""
    try:
        yield
    except ValueError as error:
        raise RequestRefused("the message's arrays are not finite, or not those that belong here") from error
