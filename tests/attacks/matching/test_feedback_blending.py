"""Feedback blending, and as many problems at once as memory holds."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fedgauge.attacks.base import Budget, ClientState, Knowledge, Observation, Reconstruction, Stream, Wave
from fedgauge.attacks.matching.feedback_blending import feedback_blending
from fedgauge.attacks.matching.gradient_matching import GradientMatching
from fedgauge.client.chain import chain
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import detached_params
from fedgauge.client.rng import generator
from fedgauge.client.update import Batch

SHAPE = (1, 4, 4)


class Recorded(GradientMatching):
    """The engine, recording its starts."""

    starts: list[Tensor | None]

    def continued(
        self, wave: Wave, known: Knowledge, budget: Budget, streams: Sequence[Stream], start: Tensor | None
    ) -> list[Reconstruction]:
        self.starts.append(start)
        return super().continued(wave, known, budget, streams, start)


def recorded() -> Recorded:
    attack = Recorded()
    object.__setattr__(attack, "starts", [])
    return attack


def sequence(count: int, clients: int = 2) -> tuple[list[Wave], Knowledge]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    params = detached_params(model)
    y = torch.arange(clients) % 4
    auxiliary = Batch(torch.rand(9, *SHAPE), torch.zeros(9, dtype=torch.int64))
    known = Knowledge(model, chain(local_sgd(0.1)), SHAPE, 4, 1, (0.1,), (0.4,), labels=y[:, None], auxiliary=auxiliary)
    waves = []
    for _ in range(count):
        batches = [Batch(torch.rand(1, *SHAPE), y[[k]]) for k in range(clients)]
        seen = [Observation(1, k, params, known.forward(params, b, None)) for k, b in enumerate(batches)]
        waves.append(Wave.stack(seen))
    return waves, known


def streams(place: int) -> list[Stream]:
    return [partial(generator, "feedback", place, k) for k in range(2)]


def run(blending: feedback_blending, waves: list[Wave], known: Knowledge) -> list[list[Reconstruction]]:
    memories, found = [{} for _ in waves[0].clients], []
    for place, wave in enumerate(waves):
        results, memories = blending.advance(wave, known, Budget(3), streams(place), memories)
        found.append(results)
    return found


class JudgedBlending(feedback_blending):
    """Takes its successes from a test."""

    def __init__(self, attack: GradientMatching, alpha: float, successes: list[bool]) -> None:
        super().__init__(attack, alpha)
        object.__setattr__(self, "successes", iter(successes))

    def _remember(self, memory: ClientState, found: Reconstruction) -> ClientState:
        succeeded = next(self.successes)  # type: ignore[attr-defined]
        return super()._remember(memory, replace(found, objective=0.0 if succeeded else 1.0))


def test_the_third_image_starts_from_the_blend_of_the_first_two_and_a_failure_is_left_out() -> None:
    waves, known = sequence(5)
    attack = recorded()
    successes = [image not in (3, 8, 9) for image in range(10)]  # the second client's second image fails
    found = run(JudgedBlending(attack, 0.25, successes), waves, known)
    images = [[r.x for r in results] for results in found]
    third, fourth = attack.starts[2], attack.starts[3]
    assert third is not None and fourth is not None
    first, second, later = (images[i][0] for i in range(3))
    assert first is not None and second is not None and later is not None
    blend = 0.25 * first + 0.75 * second
    torch.testing.assert_close(third[0], blend)
    torch.testing.assert_close(fourth[0], 0.25 * blend + 0.75 * later)
    noise = known.pixels(torch.randn(1, *SHAPE, generator=streams(2)[1]("start", 0)))
    torch.testing.assert_close(third[1], noise), "one success is no blend yet"
    a, b = images[0][1], images[2][1]
    assert a is not None and b is not None
    torch.testing.assert_close(fourth[1], 0.25 * a + 0.75 * b)


def test_success_is_judged_by_the_attacks_own_objective() -> None:
    waves, known = sequence(3)
    hard, easy = recorded(), recorded()
    run(feedback_blending(hard, fit=-1.0), waves, known)
    run(feedback_blending(easy, fit=2.0), waves, known)
    noise = torch.stack([known.pixels(torch.randn(1, *SHAPE, generator=s("start", 0))) for s in streams(2)])
    assert hard.starts[2] is not None and easy.starts[2] is not None
    torch.testing.assert_close(hard.starts[2], noise)
    assert float((easy.starts[2] - noise).abs().max()) > 0.1
    failing = recorded()
    run(feedback_blending(failing, fit=-1.0, discard_failures=False), waves, known)
    assert failing.starts[2] is not None
    torch.testing.assert_close(failing.starts[2], easy.starts[2])


@pytest.mark.parametrize("start", ["half", "mean", "noise"])
def test_the_controls_start_from_their_images(start: str) -> None:
    waves, known = sequence(2)
    attack = recorded()
    run(feedback_blending(attack, start=start), waves, known)  # type: ignore[arg-type]
    assert known.auxiliary is not None
    expected = {"half": torch.full(SHAPE, 0.5), "mean": known.auxiliary.x.mean(0)}.get(start)
    for begun in attack.starts:
        if expected is None:
            assert begun is None
        else:
            assert begun is not None
            torch.testing.assert_close(begun[1, 0], expected)


# ---------------------------------------------------------------------------------- one wave at a time, as in a live run


def test_a_clients_state_does_not_depend_on_the_others_of_its_wave() -> None:
    waves, known = sequence(1)
    attack, blend = recorded(), torch.rand(1, *SHAPE)
    blending = feedback_blending(attack, fit=2.0)
    kept = {"images": torch.tensor(2), "blend": blend}
    _, (first, second) = blending.advance(waves[0], known, Budget(3), streams(0), [kept, {}])
    (start,) = attack.starts
    assert start is not None and torch.equal(start[0], blend)
    torch.testing.assert_close(start[1], known.pixels(torch.randn(1, *SHAPE, generator=streams(0)[1]("start", 0))))
    assert (int(first["images"]), int(second["images"])) == (3, 1)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(first["blend"], blend)


def test_a_blend_of_another_batch_size_is_not_used() -> None:
    """The number of clients in a secure sum may change from round to round."""
    waves, known = sequence(1)
    attack = recorded()
    blending = feedback_blending(attack, fit=2.0)
    kept = {"images": torch.tensor(2), "blend": torch.rand(3, *SHAPE)}
    _, after = blending.advance(waves[0], known, Budget(3), streams(0), [kept, kept])
    (start,) = attack.starts
    assert start is not None
    torch.testing.assert_close(start[1], known.pixels(torch.randn(1, *SHAPE, generator=streams(0)[1]("start", 0))))
    assert all(torch.equal(memory["blend"], kept["blend"]) and int(memory["images"]) == 2 for memory in after)
