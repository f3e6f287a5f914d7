"""Learned rows: the features of a word, the training data, and positions found under every known chain."""

from dataclasses import replace

import pytest
import torch

from fedgauge.attacks.base import Budget
from fedgauge.attacks.grading.baselines import random_words
from fedgauge.attacks.learned.shadow_updates import ShadowTrainer, UpdateFeatures
from fedgauge.attacks.text.learned_rows import learned_rows, row_features, row_tables, shadow_rows
from fedgauge.client.chain import Chain, chain
from fedgauge.client.data.corpora import Text
from fedgauge.client.local_training import local_sgd
from fedgauge.client.models.vision import mlp
from fedgauge.defenses.noise import gaussian
from fedgauge.defenses.prune import prune
from fedgauge.defenses.sign import sign
from tests.attacks.text.shadow_text import CLASSIFIED, SGD, SPOKEN, accuracy, model_for, threat
from tests.attacks.text.small_text import read, refused

SMALL = learned_rows(hidden=64)


@pytest.mark.parametrize(
    ("data", "links", "least"),
    [
        (SPOKEN, chain(prune(0.1), local_sgd(1.0)), 70),
        (SPOKEN, chain(gaussian(0.005), local_sgd(1.0)), 70),
        (SPOKEN, chain(sign(), local_sgd(1.0)), 60),
        (CLASSIFIED, SGD, 25),
    ],
    ids=["prune", "noise", "sign", "classification"],
)
def test_positions_are_read_from_rows_behind_every_chain_that_is_known(data: Text, links: Chain, least: float) -> None:
    wave, known, truth = threat(data, 400, links, clients=20)
    found = read(SMALL, wave, known, Budget(400))
    assert {r.status for r in found} == {"converged"}
    floor = accuracy(read(random_words(), wave, known), truth, data)
    assert accuracy(found, truth, data) > max(least, 2 * floor)


def test_a_row_is_described_by_its_direction_and_by_its_size_next_to_the_largest() -> None:
    updates = {"table": torch.tensor([[[3.0, 4.0], [0.0, 0.0], [0.0, -0.5]]]), "bias": torch.tensor([[0.2, -2.0, 0.0]])}
    expected = [[0.6, 0.8, 0.0, 1.0, -1.0, 0.0], [0.0, 0.0, -6.0, -1.0, 0.0, 0.0], [0.0, -1.0, -1.0, 0.0, -6.0, 0.0]]
    features = row_features(("table", "bias"), updates)
    torch.testing.assert_close(features, torch.tensor([expected]), rtol=1e-4, atol=1e-5)


def test_each_position_of_shadow_data_has_its_word_as_candidate_and_copies_are_masked() -> None:
    wave, known, _ = threat(SPOKEN, 400)
    shadow = ShadowTrainer(known, wave.params, UpdateFeatures(False))
    rows, truth = shadow_rows(shadow, row_tables(model_for(SPOKEN), wave.params), True)
    x = shadow.auxiliary.x[shadow.groups(True)[:, 0]]
    assert truth.tolist() == [[words.index(word) for word in words] for words in x.tolist()], (
        "where the word first stands"
    )
    nobody = rows[..., -1] == 1
    assert bool(nobody.any()) and not bool(nobody.gather(1, truth).any())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"batch_size": 2}, "batch of 2"),
        ({"auxiliary": None}, "auxiliary"),
        ({"model": mlp((1, 4, 4), 2)}, "language model"),
    ],
)
def test_unreadable_input_is_refused(changes: dict[str, object], word: str) -> None:
    wave, known, _ = threat(SPOKEN, 40)
    assert refused(read(SMALL, wave, replace(known, **changes)), word)  # type: ignore[arg-type]


def test_without_a_row_for_every_word_there_is_nothing_to_read() -> None:
    wave, known, _ = threat(CLASSIFIED, 40, freeze=("words",))
    assert refused(read(SMALL, wave, known), "row")
