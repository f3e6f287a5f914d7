"""Defenses as Flower mods: theta + defense(weights - theta), in anybody's ClientApp."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Generator, Tensor

from fedgauge.client.chain import chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.mods import Mod, as_mod
from fedgauge.client.transforms import Link, UpdateTransform, per_example
from fedgauge.client.update import Update, UpdateFn
from fedgauge.defenses.clip import clip
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.sign import sign
from tests.wire import travel

pytestmark = pytest.mark.usefixtures("identity")

COUNT = "num_batches_tracked"
THETA = {"weight": torch.tensor([[1.0, -2.0], [0.5, 4.0]]), "bias": torch.tensor([3.0, 0.0]), COUNT: torch.tensor(7)}
# the update is 3 in one weight and 4 in one bias: its norm is 5
TRAINED = {"weight": torch.tensor([[4.0, -2.0], [0.5, 4.0]]), "bias": torch.tensor([3.0, 4.0]), COUNT: torch.tensor(9)}


def answer(mods: list[Mod], content: RecordDict | Error | None = None, **sent: Any) -> Message:
    """What an ordinary ClientApp, which knows nothing of fedgauge, replies with under some mods."""
    app = ClientApp()

    @app.train(mods=mods)  # type: ignore[arg-type]
    def train(message: Message, context: Context) -> Message:
        return Message(weights() if content is None else content, reply_to=message)

    question = RecordDict({"config": ConfigRecord({"lr": 0.1}), **(sent or {"arrays": ArrayRecord(THETA)})})
    message = travel(Message(question, dst_node_id=5, message_type="train"))
    return travel(app(message, Context(1, 5, {}, RecordDict(), {})))


def weights(**changes: Any) -> RecordDict:
    arrays = ArrayRecord({k: t for k, t in (TRAINED | changes).items() if t is not None})
    return RecordDict({"model": arrays, "numbers": MetricRecord({"num-examples": 3, "loss": 0.5})})


def tensors(message: Message) -> dict[str, Tensor]:
    return dict(message.content.array_records["model"].to_torch_state_dict())


@dataclass(frozen=True)
class note(UpdateTransform):
    """Leaves an update alone, and keeps what it saw and the generator that it got."""

    seen: list[tuple[Update, Generator | None]] = field(default_factory=list)

    def apply(self, update: Update, rng: Generator | None) -> Update:
        self.seen.append((dict(update), rng))
        return dict(update)


def test_defenses_of_one_mod_share_no_secret_generator() -> None:
    """A mask's zeros give Mersenne Twister's state, and so all that others draw from the same one."""
    first, second = note(), note()
    answer([as_mod(chain(first, second)), as_mod(chain(first, second), shared := Generator())])
    (_, inner), (_, outer) = first.seen
    assert inner is second.seen[0][1] is shared, "the last mod is nearest to the training"
    assert None not in (outer, second.seen[1][1]) and outer is not second.seen[1][1]


def test_a_defense_acts_on_the_update_alone_and_weights_come_back() -> None:
    seen = note()
    reply = answer([as_mod(clip(2.5)), as_mod(seen)])  # half of a norm of 5
    arrays = tensors(reply)
    assert arrays["weight"].tolist() == [[2.5, -2.0], [0.5, 4.0]] and arrays["bias"].tolist() == [3.0, 2.0]
    assert list(arrays) == list(TRAINED) and arrays[COUNT].equal(torch.tensor(9))
    assert sorted(seen.seen[0][0]) == ["bias", "weight"], "a count of batches is no part of the update"
    assert dict(reply.content.metric_records["numbers"]) == {"num-examples": 3, "loss": 0.5}
    inside = tensors(answer([as_mod(clip(5.0))]))
    assert all(torch.equal(inside[k], TRAINED[k]) for k in TRAINED)


def test_two_mods_are_the_chain_of_the_two_in_their_order() -> None:
    """sign then clip is not clip then sign: 6 signs of norm sqrt(6), against a clipped update's signs."""
    clipped_last = tensors(answer([as_mod(clip(1.0)), as_mod(sign())]))
    signed_last = tensors(answer([as_mod(sign()), as_mod(clip(1.0))]))
    update = torch.cat([(clipped_last[k] - THETA[k]).flatten() for k in ("weight", "bias")])
    assert float(update.norm()) == pytest.approx(1.0, abs=1e-6)
    update = torch.cat([(signed_last[k] - THETA[k]).flatten() for k in ("weight", "bias")])
    assert sorted(set(update.abs().tolist())) == [0.0, 1.0]
    for k, t in tensors(answer([as_mod(chain(clip(1.0), sign()))])).items():
        torch.testing.assert_close(signed_last[k], t)


def test_noise_has_the_size_it_says_and_a_seed_repeats_it() -> None:
    big = {"weight": torch.zeros(200_000)}

    def noisy(mod: Mod) -> Tensor:
        return tensors(answer([mod], RecordDict({"model": ArrayRecord(big)}), arrays=ArrayRecord(big)))["weight"]

    one, again = (as_mod(gaussian(0.5), Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first := noisy(one), noisy(again))
    assert not torch.equal(first, noisy(one)), "each message gets noise of its own"
    secret = noisy(as_mod(gaussian(0.5)))
    assert not torch.equal(secret, noisy(as_mod(gaussian(0.5)))), "the client's own secret, new in every process"
    assert float(secret.std()) == pytest.approx(0.5, rel=0.01)


def test_error_replies_pass() -> None:
    reply = answer([as_mod(clip(1.0)), as_mod(gaussian(1.0))], Error(7, "no data today"))
    assert (reply.error.code, reply.error.reason) == (7, "no data today")


def test_a_reply_keeps_its_precision() -> None:
    """Stock FedAdam sends float64 from round 2 on; the clients' models go on in float32."""
    wide = {k: t.double() if t.is_floating_point() else t for k, t in THETA.items()}
    reply = tensors(answer([as_mod(clip(2.5))], arrays=ArrayRecord(wide)))
    assert reply["bias"].dtype == torch.float32 and reply["bias"].tolist() == [3.0, 2.0]


@pytest.mark.parametrize("value", [1e-4, 2e-3])
def test_an_update_of_half_precision_is_clipped_and_rounded_once(value: float) -> None:
    """A clip to 0.05 let a norm of 0.2 pass."""
    start, trained = ({"w": torch.full((250_000,), entry, dtype=torch.float16)} for entry in (0.0, value))
    clipped, noisy = note(), note()
    mod = as_mod(chain(clip(0.02), clipped, gaussian(1e-3), noisy))
    reply = answer([mod], RecordDict({"model": ArrayRecord(trained)}), arrays=ArrayRecord(start))
    size = float(clipped.seen[0][0]["w"].double().norm())
    assert size == pytest.approx(0.02, rel=2.0**-10), "no further, as the accounting adds"
    sent = tensors(reply)["w"]
    assert sent.dtype == torch.float16 and torch.equal(sent, noisy.seen[0][0]["w"].half()), "rounded behind the noise"


@pytest.mark.parametrize(
    "content",
    [
        weights(bias=None),
        weights(extra=torch.zeros(2)),
        weights(bias=torch.zeros(3)),
        weights(bias=torch.zeros(2, 1)),
        weights(bias=torch.tensor([3, 4])),
        weights(**{COUNT: torch.tensor(9.0)}),
        RecordDict({"numbers": MetricRecord({"a": 1})}),
        RecordDict({"model": ArrayRecord(TRAINED), "more": ArrayRecord(TRAINED)}),
    ],
    ids=["fewer", "more", "longer", "column", "integers for floats", "floats for integers", "none", "two"],
)
def test_a_reply_that_does_not_match_the_message_is_refused(content: RecordDict) -> None:
    """Undefended it must not leave: integers in the place of weights would pass by the defense."""
    two: dict[str, Any] = {"arrays": ArrayRecord(THETA), "buffers": ArrayRecord(THETA)}
    for sent, named in (dict[str, Any](), "match|ArrayRecord"), (two, "ArrayRecord"):
        with pytest.raises(ValueError, match=named):
            answer([as_mod(clip(1.0))], content, **sent)


@dataclass(frozen=True)
class on_examples(Link):
    """A defense of the data."""

    def __call__(self, compute: UpdateFn) -> UpdateFn:
        return compute


@pytest.mark.parametrize(
    "transform",
    [per_example(clip(1.0)), local_sgd(0.1), chain(chain(local_sgd(1.0))), chain(clip(1.0), on_examples())],
    ids=str,
)
def test_what_needs_the_examples_or_trains_is_no_mod(transform: Any) -> None:
    """An average over no examples is NaN, and a step along an update is no defense."""
    with pytest.raises(ValueError, match="finished"):
        as_mod(transform)
