"""Several rounds together: noise averages out over the same record, and rounds with another one fall silent."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch

from fedgauge.attacks.base import Budget, ClientState, Knowledge, Observation, Reconstruction, Wave
from fedgauge.attacks.matching.several_rounds import several_rounds
from fedgauge.attacks.modality.image_metrics import psnr
from fedgauge.client.chain import Chain, chain
from fedgauge.client.gradient import gradient
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params, mlp
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch
from fedgauge.defenses.noise import gaussian
from fedgauge.server.store.tape import read_tensors, write_tensors

SHAPE, CLASSES = (1, 6, 6), 4
BARE = several_rounds(tv=1e-4)


def knowledge(links: Chain) -> Knowledge:
    torch.manual_seed(0)
    model = mlp(SHAPE, CLASSES, hidden=[24])
    return Knowledge(model, links, SHAPE, CLASSES, 1, (0.5,), (0.25,))


def record(seed: int) -> Batch:
    return Batch(torch.rand(1, *SHAPE, generator=generator("record", seed)), torch.tensor([seed % CLASSES]))


def rounds(known: Knowledge, records: Sequence[Batch]) -> list[Wave]:
    """A wave of one client for each record, at weights that move from round to round."""
    waves, params = [], detached_params(known.model)
    client = known.chain(gradient(known.model, normalise=known.normalise))
    for r, batch in enumerate(records, 1):
        update = {k: t.detach() for k, t in client(params, batch, generator("client", r)).items()}
        waves.append(Wave.stack([Observation(r, 0, params, update)]))
        params = {k: t + 0.05 * torch.randn(t.shape, generator=generator("moved", r, k)) for k, t in params.items()}
    return waves


def follow(
    attack: several_rounds, known: Knowledge, waves: Sequence[Wave], iterations: int = 200
) -> tuple[list[Reconstruction], list[ClientState]]:
    memories, found = [{}], []
    for wave in waves:
        (one,), memories = attack.advance(wave, known, Budget(iterations), [partial(generator, wave.round)], memories)
        found.append(one)
    return found, memories


@pytest.mark.full
def test_several_rounds_reveal_more_than_one() -> None:
    known, batch = knowledge(chain(gaussian(0.05), local_sgd(0.1))), record(1)
    waves = rounds(known, [batch] * 4)
    together, _ = follow(BARE, known, waves)
    alone = [follow(BARE, known, [wave])[0][0] for wave in waves]
    scores = [[float(psnr(batch.x, r.x)) for r in found if r.x is not None] for found in (together, alone)]
    assert scores[0][0] == pytest.approx(scores[1][0])  # the first round has no others
    # four times the information of one round are 6 dB
    assert 3 < scores[0][-1] - sum(scores[1]) / len(scores[1]) < 9


def test_rounds_with_other_examples_are_ignored() -> None:
    known = knowledge(chain(local_sgd(0.1)))
    waves = rounds(known, [record(0), record(1), record(1), record(5)])
    found, _ = follow(BARE, known, waves)
    assert [r.reason for r in found] == [
        "1 of 1 rounds agree", "1 of 2 rounds agree", "2 of 3 rounds agree", "1 of 4 rounds agree",
    ]  # fmt: skip
    (alone,), _ = follow(BARE, known, waves[3:])
    assert found[3].x is not None and alone.x is not None
    truth = record(5).x
    assert float(psnr(truth, found[3].x)) > float(psnr(truth, alone.x)) - 1


def test_memory_is_limited_and_survives_the_process(tmp_path: object) -> None:
    attack = several_rounds(most=2)
    known = knowledge(chain(local_sgd(0.1)))
    waves = rounds(known, [record(0)] * 3)
    _, (memory,) = follow(attack, known, waves, 2)
    assert int(memory["rounds"]) == 2
    torch.testing.assert_close(memory["1/update/1.bias"], waves[2].update["1.bias"][0])
    torch.testing.assert_close(memory["0/params/1.weight"], waves[1].params["1.weight"])
    path = tmp_path / "memory"  # type: ignore[operator]
    write_tensors(path, memory)
    budget, streams = Budget(20), [partial(generator, "x")]
    first, _ = attack.advance(waves[2], known, budget, streams, [memory])
    again, _ = attack.advance(waves[2], known, budget, streams, [read_tensors(path)])
    assert first[0].x is not None and again[0].x is not None
    assert torch.equal(first[0].x, again[0].x)
