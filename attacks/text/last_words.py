"""Last words: what follows a sentence's known words is named by the head's row alone, since nothing is predicted from it.

Each row of the head's update is a sum of the vectors from which its word was predicted; all of them but the last are known.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedgauge.attacks.text.certificate import TOLERANCE, GuessVerifier
from fedgauge.attacks.text.layer_inputs import head, layer_inputs
from fedgauge.client.data.corpora import targets
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.tokenizer import framed
from fedgauge.client.update import Batch, Update

FIRST = 3  # words of the highest rank that are tried for each sentence


def complete_sentences(
    trial: GuessVerifier, model: LanguageModel, known: Sequence[Sequence[int]]
) -> tuple[Batch, float]:
    """Sentences with their last words, and the relative error that is left.

    Args:
        known: of each sentence all words but its last, one at least.
    """
    room = trial.known.shape[0]
    words = [[*ids[: room - 1], ids[0]] for ids in known]  # any word in the last place: the true one shows beside it
    batch = _batch(trial, model, words)
    update = trial.of(batch)
    error = trial.distance(update)
    if error <= TOLERANCE:
        return batch, error
    ranked = _ranked(trial, model, batch, update, [len(ids) - 2 for ids in words])
    likely = [[*ids[:-1], rank[0]] for ids, rank in zip(words, ranked, strict=True)]
    guess = _batch(trial, model, likely)
    if (found := trial.error(guess)) < error:
        words, batch, error = likely, guess, found
    for ids, rank in zip(words, ranked, strict=True):
        for word in rank:
            if error <= TOLERANCE:
                return batch, error
            before, ids[-1] = ids[-1], word
            changed = _batch(trial, model, words)
            if (found := trial.error(changed)) < error:
                batch, error = changed, found
            else:
                ids[-1] = before
    return batch, error


def _batch(trial: GuessVerifier, model: LanguageModel, words: Sequence[Sequence[int]]) -> Batch:
    x = framed(words, trial.known.shape[0], model.pad)
    return Batch(x, targets(x, model.pad))


def _ranked(
    trial: GuessVerifier, model: LanguageModel, batch: Batch, update: Update, places: Sequence[int]
) -> list[list[int]]:
    """For each sentence the words that may end it, the likeliest first, and then its own words.

    Rows of tied embeddings have an input's share, too, where their words occur: these are tried because their rows are no
    evidence.
    """
    name = model.parts.head[0]
    rows = (trial.update[name].double() - update[name].double()).cpu()  # (V, width)
    fed = layer_inputs(model, trial.params, head(model), batch.x)
    vectors = torch.stack([fed[b, place] for b, place in enumerate(places)]).double().cpu()
    shares = rows @ torch.linalg.pinv(vectors)  # (V, B)
    own = sorted(set(batch.x[batch.x != model.pad].tolist()))
    return [list(dict.fromkeys(_order(shares[:, b], own))) for b in range(len(places))]


def _order(shares: Tensor, own: Sequence[int]) -> Iterator[int]:
    elsewhere = shares.clone()
    elsewhere[list(own)] = -torch.inf
    best = elsewhere.topk(FIRST).indices.tolist()
    alone = shares.topk(FIRST).indices.tolist()
    # nothing else adds to the row of a word that occurs nowhere
    yield from (best if float(elsewhere[best[0]]) > float(shares.abs().max()) / 10 else alone)
    yield from alone
    yield from sorted(own, key=lambda word: -float(shares[word]))
