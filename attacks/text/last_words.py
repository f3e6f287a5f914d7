"""Last words: a sentence's last word shows only in the head's row, since nothing is predicted from it.

Each row of the head's update is a sum of the vectors from which its word was predicted; all vectors but the last are known. Where
the head is frozen, the difference that remains is followed through the model to the logits at the sentence's end.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.func import functional_call

from fedgauge.attacks.text.certificate import TOLERANCE, GuessVerifier
from fedgauge.attacks.text.layer_inputs import head, layer_inputs
from fedgauge.client.data.corpora import targets
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.models.tokenizer import framed
from fedgauge.client.update import Batch, Update

MOST = 12  # of the words that a frozen head's logits rank first
FIRST = 3  # highest-ranked words that are tried for each sentence


def complete_sentences(
    verifier: GuessVerifier, model: LanguageModel, known: Sequence[Sequence[int]]
) -> tuple[Batch, float]:
    """Sentences completed by their last words, and the relative error that remains.

    Args:
        known: each sentence's words without the last; at least one.
    """
    room = verifier.known.shape[0]
    words = [
        [*ids[: room - 1], ids[0]] for ids in known
    ]  # any word may stand last: the true one shows in the difference
    batch = _batch(verifier, model, words)
    update = verifier.update_of(batch)
    error = verifier.distance(update)
    if error <= TOLERANCE:
        return batch, error
    ranked = _ranked(verifier, model, batch, update, [len(ids) - 2 for ids in words])
    likely = [[*ids[:-1], rank[0]] for ids, rank in zip(words, ranked, strict=True)]
    guess = _batch(verifier, model, likely)
    if (new_error := verifier.error(guess)) < error:
        words, batch, error = likely, guess, new_error
    for ids, rank in zip(words, ranked, strict=True):
        for word in rank:
            if error <= TOLERANCE:
                return batch, error
            before, ids[-1] = ids[-1], word
            changed = _batch(verifier, model, words)
            if (new_error := verifier.error(changed)) < error:
                batch, error = changed, new_error
            else:
                ids[-1] = before
    return batch, error


def _batch(verifier: GuessVerifier, model: LanguageModel, words: Sequence[Sequence[int]]) -> Batch:
    x = framed(words, verifier.known.shape[0], model.pad)
    return Batch(x, targets(x, model.pad))


def _ranked(
    verifier: GuessVerifier, model: LanguageModel, batch: Batch, update: Update, positions: Sequence[int]
) -> list[list[int]]:
    """For each sentence the words that may end it, the likeliest first, and then the batch's own words.

    In tied embeddings the rows of words that occur also hold an input's share, so they are no evidence: these words are tried too.
    """
    name, own = model.parts.head[0], sorted(set(batch.x[batch.x != model.pad].tolist()))
    if name not in update:
        raised = _raised(verifier, model, batch, update, positions)
        return [row.topk(MOST).indices.tolist() for row in raised]
    rows = (verifier.update[name].double() - update[name].double()).cpu()  # (V, width)
    inputs = layer_inputs(model, verifier.params, head(model), batch.x)
    vectors = torch.stack([inputs[b, position] for b, position in enumerate(positions)]).double().cpu()
    shares = rows @ torch.linalg.pinv(vectors)  # (V, B)
    return [list(dict.fromkeys(_order(shares[:, b], own))) for b in range(len(positions))]


def _raised(
    verifier: GuessVerifier, model: LanguageModel, batch: Batch, update: Update, positions: Sequence[int]
) -> Tensor:
    """How the difference between the observed update and the guess's raises the logits (B, V) from which last words come."""
    missing = {name: verifier.update[name] - t for name, t in update.items()}
    ids = batch.x.to(next(iter(missing.values())).device)
    leaves = {name: verifier.params[name].detach().requires_grad_() for name in missing}
    with torch.enable_grad():
        logits: Tensor = functional_call(model, {**verifier.params, **leaves}, (ids,))
        signal = torch.zeros_like(logits, requires_grad=True)
        slopes = torch.autograd.grad(logits, list(leaves.values()), signal, create_graph=True)
        # linear in the signal: its derivative by the signal is the logits' derivative along the difference
        (raised,) = torch.autograd.grad(slopes, signal, list(missing.values()))
    return torch.stack([raised[b, position] for b, position in enumerate(positions)]).cpu()


def _order(shares: Tensor, own: Sequence[int]) -> Iterator[int]:
    elsewhere = shares.clone()
    elsewhere[list(own)] = -torch.inf
    best = elsewhere.topk(FIRST).indices.tolist()
    alone = shares.topk(FIRST).indices.tolist()
    # only the last word adds to the row of a word that occurs nowhere else
    yield from (best if float(elsewhere[best[0]]) > float(shares.abs().max()) / 10 else alone)
    yield from alone
    yield from sorted(own, key=lambda word: -float(shares[word]))
