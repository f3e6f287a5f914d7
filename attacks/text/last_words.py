"""Last words: a sentence's last word shows only in the head's row, since nothing is predicted from it.

Each row of the head's update is a sum of the vectors from which its word was predicted; all vectors but the last are known. Where
the head is frozen, the difference that remains is followed through the model to the logits at the sentence's end.
"""

from collections.abc import Sequence

import torch

from fedgauge.attacks.text.certificate import TOLERANCE, GuessVerifier
from fedgauge.attacks.text.layer_inputs import head, layer_inputs, logits_along
from fedgauge.client.update import Batch, Update, relative_error

MOST = 12  # of the words that a frozen head's logits rank first
FIRST = 3  # highest-ranked words that are tried for each sentence


def labelled(verifier: GuessVerifier, sentences: Sequence[Sequence[int]]) -> tuple[Batch, float]:
    """Sentences with the labels that explain the update best, or a decoder's with their last words, and the error that remains."""
    if verifier.decodes:
        return complete_sentences(verifier, sentences)
    return verifier.best_labels(verifier.framed(sentences))


def complete_sentences(verifier: GuessVerifier, known: Sequence[Sequence[int]]) -> tuple[Batch, float]:
    """Sentences completed by their last words, and the relative error that remains.

    Args:
        known: each sentence's words without the last; at least one.
    """
    # any word may stand last: the true one shows in the difference
    words = [[*ids[: verifier.known.shape[0] - 1], ids[0]] for ids in known]
    batch = verifier.decoded(words)
    update = verifier.update_of(batch)
    error = relative_error(update, verifier.update)
    step = {name: verifier.update[name] - t for name, t in update.items()}
    ranked = _ranked(verifier, batch, step, [len(ids) - 2 for ids in words])
    first = {i: rank[0] for i, rank in enumerate(ranked)}
    for change in [first, *({i: word} for i, rank in enumerate(ranked) for word in rank)]:
        changed = [[*ids[:-1], change.get(i, ids[-1])] for i, ids in enumerate(words)]
        guess = verifier.decoded(changed)
        if (new_error := verifier.error(guess)) < error:
            words, batch, error = changed, guess, new_error
        if error <= TOLERANCE:
            break
    return batch, error


def _ranked(verifier: GuessVerifier, batch: Batch, step: Update, ends: Sequence[int]) -> list[list[int]]:
    """For each sentence the words that may end it, the likeliest first.

    Args:
        step: what a guess's update lacks; ends: the positions before the last words.
    """
    model, name, sentences = verifier.model, verifier.model.parts.head[0], range(len(ends))
    if name not in step:
        raised = logits_along(model, verifier.params, step, batch.x.to(verifier.device))[sentences, ends]
        return raised.topk(MOST).indices.tolist()
    inputs = layer_inputs(model, verifier.params, [head(model)], batch.x)[0][sentences, ends].double()
    ranked, own = [], batch.x[batch.x != model.pad].unique().cpu()
    for shares in (step[name].double() @ torch.linalg.pinv(inputs)).cpu().T:  # (V,) of each sentence
        elsewhere = shares.index_fill(0, own, -torch.inf)
        best, alone = elsewhere.topk(FIRST).indices.tolist(), shares.topk(FIRST).indices.tolist()
        # only the last word adds to the row of a word that occurs nowhere else; in tied embeddings the rows of words that occur
        # also hold an input's share, so they are no evidence: all these words are tried, too
        sure = float(elsewhere.max()) > float(shares.abs().max()) / 10
        likely = own[shares[own].argsort(descending=True)].tolist()
        ranked.append(list(dict.fromkeys([*(best if sure else []), *alone, *likely])))
    return ranked
