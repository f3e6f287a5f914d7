"""The search of ATS policies: its two scores against answers known on paper, and its order."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

from fedgauge.client.federation import Federation
from fedgauge.client.update import Batch, Update
from fedgauge.simulations.experiments.search_ats import PolicyScorer, accuracy, candidates, main, privacy, search

Make = Callable[..., Federation]
MLP = {"use": "mlp", "hidden": [32]}


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


class Slopes(nn.Module):
    """A network whose logits' sum has given derivatives by the images: row i of them for image i."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.slopes = slopes

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) * self.slopes).sum(1, keepdim=True)


def test_the_accuracy_score_of_uncorrelated_images_by_hand() -> None:
    # rows of a Hadamard matrix have mean 0 and are orthogonal: all eigenvalues are 1
    slopes = torch.tensor([[1.0, 1, -1, -1], [1.0, -1, 1, -1], [1.0, -1, -1, 1]], dtype=torch.float64)
    found = accuracy(Slopes(slopes), torch.zeros(3, 1, 2, 2, dtype=torch.float64))
    assert found == pytest.approx(-3 * (math.log(1 + 1e-5) + 1 / (1 + 1e-5)), rel=1e-9)


def test_the_accuracy_score_of_images_that_look_alike_by_hand() -> None:
    # one eigenvalue 3 and two of 0
    slopes = torch.tensor([[1.0, 2, 3, 4]] * 3, dtype=torch.float64)
    found = accuracy(Slopes(slopes), torch.zeros(3, 1, 2, 2, dtype=torch.float64))
    by_hand = -(math.log(3 + 1e-5) + 1 / (3 + 1e-5)) - 2 * (math.log(1e-5) + 1e5)
    assert found == pytest.approx(by_hand, rel=1e-6)


def test_a_network_that_does_not_look_at_an_image_has_no_score() -> None:
    slopes = torch.tensor([[1.0, 2, 3, 4], [0.0, 0, 0, 0]], dtype=torch.float64)
    assert accuracy(Slopes(slopes), torch.zeros(2, 1, 2, 2, dtype=torch.float64)) == -math.inf


def test_the_privacy_score_of_a_linear_gradient_by_hand() -> None:
    """Where the gradient is the image itself, the similarity on the way is the cosine of the blend with the image."""

    def itself(params: Any, batch: Batch, rng: Any) -> Update:
        return {"x": batch.x[0].flatten(), "constant": torch.ones(3, dtype=batch.x.dtype)}

    x = torch.rand(1, 1, 3, 3, generator=seeded(1), dtype=torch.float64)
    noise = torch.rand(1, 3, 3, generator=seeded(2)).double().flatten()
    target, total = x.flatten(), 0.0
    for j in range(5):
        blend = (1 - j / 4) * noise + j / 4 * target
        both = (float(torch.cosine_similarity(blend, target, dim=0)) + 1) / 2  # a constant gradient gives all away
        total += both * (0.5 if j in (0, 4) else 1) / 4
    assert privacy(itself, {}, Batch(x, torch.zeros(1)), seeded(2), points=4) == pytest.approx(total, rel=1e-12)


def test_a_gradient_that_vanishes_is_like_no_other() -> None:
    def dead(params: Any, batch: Batch, rng: Any) -> Update:
        return {"x": 0 * batch.x[0].flatten()}

    assert privacy(dead, {}, Batch(torch.rand(2, 1, 3, 3), torch.zeros(2)), seeded()) == 0


def test_candidates_are_different_short_and_numbered_as_the_list() -> None:
    found = candidates(400, seeded())
    assert len(set(found)) == 400
    assert {n for policy in found for n in policy} == set(range(50))
    lengths = [len(policy) for policy in found]
    assert 5 < sum(n == 2 for n in lengths) < 60, "one place in 51 is left empty"
    assert set(lengths) <= {1, 2, 3}
    assert candidates(400, seeded()) == found
    assert candidates(1, seeded(1)) != found[:1]


@pytest.mark.parametrize("count", [0, 50**3 + 50**2 + 51])
def test_as_many_candidates_as_there_are_not_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"127550 policies of at most 3 operations, got .*{count}$"):
        candidates(count, seeded())


@pytest.mark.parametrize("images", [(0, 10), (10, 1), (65, 10), (10, 65)])
def test_images_that_there_are_not_are_refused(images: tuple[int, int], make_federation: Make) -> None:
    with pytest.raises(ValueError, match=f"at most 64 .*got {images[0]} and {images[1]}"):
        PolicyScorer(make_federation(data={"auxiliary": 64}), images)


@pytest.fixture(scope="module")
def trial(make_federation: Make) -> PolicyScorer:
    return PolicyScorer(make_federation(model=MLP, data={"auxiliary": 256}), (24, 40), steps=20)


def test_a_policy_that_destroys_the_images_is_more_private_and_the_published_ones_are_too(trial: PolicyScorer) -> None:
    """3-21-3 pushes digits out of the frame; nothing is what is undefended."""
    scored = {policy: trial.score(policy, 0) for policy in ((), (7, 4, 15), (21, 13, 3), (3, 21, 3))}
    bare, published, hybrid, destroyed = scored.values()
    assert bare.privacy == max(s.privacy for s in scored.values())
    assert published.privacy < bare.privacy - 0.01
    assert max(hybrid.privacy, destroyed.privacy) < bare.privacy - 0.05
    assert destroyed.accuracy < bare.accuracy, "what nobody can see cannot be learned either"
    assert trial.score((21, 13, 3), 0) == hybrid, "equal seeds, equal scores"


def test_the_search_sorts_by_privacy_what_is_accurate_enough(trial: PolicyScorer) -> None:
    policies = [(7, 4, 15), (21, 13, 3), (3, 21, 3), (12,), (39, 28)]
    every = search(trial, policies, -math.inf)
    assert {s.policy for s in every} == {"7-4-15", "21-13-3", "3-21-3", "12", "39-28"}
    assert [s.privacy for s in every] == sorted(s.privacy for s in every)
    least = sorted(s.accuracy for s in every)[2]
    assert search(trial, policies, least) == [s for s in every if s.accuracy >= least]
    assert len(search(trial, policies, least)) == 3


def test_weights_of_the_scenario_are_what_privacy_is_scored_on_and_accuracy_is_not(
    trial: PolicyScorer, make_federation: Make, tmp_path: Path
) -> None:
    from safetensors.torch import save_file

    moved = {k: p + 0.1 for k, p in trial.federation.initial()[0].items()}
    save_file(moved, tmp_path / "net.safetensors")
    model = {**MLP, "weights": str(tmp_path / "net.safetensors")}
    loaded = PolicyScorer(make_federation(model=model, data={"auxiliary": 256}), (24, 40))
    assert all(torch.equal(p, moved[k]) for k, p in loaded._trained.items())
    assert loaded.score((7,), 0).accuracy == trial.score((7,), 0).accuracy
    assert loaded.score((7,), 0).privacy != trial.score((7,), 0).privacy


SCENARIO = """
rounds = 1
clients = 2
[data]
use = "mnist5k"
auxiliary = 64
[model]
use = "mlp"
hidden = [8]
[[chain]]
use = "local_sgd"
rate = 0.1
"""


def test_it_prints_the_undefended_the_published_and_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s.toml").write_text(SCENARIO)
    arguments = ["--candidates", "3", "--images", "4", "8", "--threshold=-1e9", "--show", "2"]
    assert main([str(tmp_path / "s.toml"), *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 of 3 policies have an accuracy score of -1000000000.0 or more"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[4:]]
    assert [r[0] for r in rows[:3]] == ["none", "7-4-15", "21-13-3"]
    assert len(rows) == 5
    assert all(0 <= float(r[1]) <= 1 for r in rows)
    assert float(rows[3][1]) <= float(rows[4][1])


def test_a_mistake_is_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.toml")]) == 2
    assert capsys.readouterr().err.startswith(f"search_ats: {tmp_path / 'none.toml'}: there is no such file")
    (tmp_path / "s.toml").write_text(SCENARIO)
    assert main([str(tmp_path / "s.toml"), "--images", "100", "8"]) == 2
    assert "got 100 and 8" in capsys.readouterr().err
