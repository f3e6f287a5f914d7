"""Networks of text as people bring them: each is matched with right numbers and attacked, or refused with a sentence."""

import re

import pytest
import torch

from tests.zoo.text import ATTACKS, EQUAL, EXAMPLES, KINDS, LENGTH, NETWORKS, TextNetwork, attacked, largest_gap, posed
from tests.zoo.text import vocabulary as words_of_sentences

pytest.importorskip("transformers", reason="the extra [text] is not installed")
each = pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.name)


@each
def test_distances_and_slopes_are_plain_autograds_or_there_is_a_sentence(network: TextNetwork) -> None:
    words = words_of_sentences()
    if network.declined:
        with pytest.raises(ValueError, match=re.escape(network.declined)):
            network.build(words)
        return
    case = posed(network.build(words))
    assert {kind: gap for kind in KINDS if (gap := largest_gap(case, kind)) > EQUAL} == {}


@each
def test_words_and_their_embeddings_are_one_batch_also_where_sentences_are_padded(network: TextNetwork) -> None:
    if network.declined:
        pytest.skip("refused when it is built")
    case = posed(network.build(words_of_sentences()))
    for batch in case.batches:
        there = batch.x != case.model.pad
        assert not there.all(), "no sentence is padded"
        by_words, by_embeddings = (
            case.model(batch.x),
            case.model(case.model.value(case.model.parts.word)[batch.x], there),
        )
        if network.task == "next_token":
            by_words, by_embeddings = by_words[there], by_embeddings[there]
        torch.testing.assert_close(by_words, by_embeddings, rtol=1e-9, atol=1e-12)


@pytest.mark.full
@each
def test_every_text_attack_runs(network: TextNetwork) -> None:
    if network.declined:
        pytest.skip("refused when it is built")
    case = posed(network.build(words_of_sentences()))
    for name in ATTACKS:
        for found in attacked(case, name):
            assert found.status in ("converged", "out_of_budget"), (name, found.reason)
            assert found.x is not None
            assert found.x.shape == (EXAMPLES, LENGTH)
