"""LAMP, TAG and DLG: gradient matching for sentences, against classifiers and next-word predictors.

Balunović et al., "LAMP: Extracting Text from Gradients with Language Model Priors" (NeurIPS 2022); Deng et al., "TAG" (2021);
Zhu et al., "Deep Leakage from Gradients" (2019), as LAMP's paper compares it.
"""

from pathlib import Path
from typing import Literal

from fedgauge.attacks.text.language_prior import AUXILIARY, LanguageModelTraining
from fedgauge.attacks.text.text_matching import Discrete, TextMatching, staircase

Loss = Literal["cosine", "l2_l1"]
WEIGHTS = {
    "cosine": (1.0, 0.2),
    "l2_l1": (25.0, 60.0),
}  # of the embeddings' lengths and of the language model, as published


def dlg_text(rate: float = 0.1, known_tokens: bool = False, published: bool = False) -> TextMatching:
    """DLG for text: squared distance, Adam from one random start. The paper's budget: 2,500 iterations.

    Args:
        known_tokens, published: as for lamp.
    """
    return TextMatching("squared", optimizer=staircase(rate), known_tokens=known_tokens, published=published)


def tag(rate: float = 0.1, l1: float = 0.01, known_tokens: bool = False, published: bool = False) -> TextMatching:
    """TAG: squared distance plus a distance of magnitudes. The paper's budget: 2,500 iterations.

    Args:
        l1: weight of the magnitudes.
        known_tokens, published: as for lamp.
    """
    return TextMatching("l2_l1", l1, staircase(rate), known_tokens=known_tokens, published=published)


def lamp(
    loss: Loss = "cosine",
    rate: float = 0.01,
    decay: float = 0.89,
    stride: int = 50,
    l1: float = 0.01,
    length: float | None = None,
    lm_weight: float | None = None,
    lm: str = AUXILIARY,
    lm_folder: Path | None = None,
    lm_steps: int = 600,
    draws: int = 500,
    orders: int = 500,
    discrete: Discrete = "alternating",
    period: int = 75,
    candidates: int = 200,
    known_tokens: bool = False,
    published: bool = False,
) -> TextMatching:
    """LAMP: gradient matching alternates with moves of words that a language model scores. The paper's budget: 2,000 iterations.

    Args:
        loss: cosine, or squares plus l1 times the magnitudes.
        rate, decay, stride: of Adam; the rate is multiplied by decay every stride iterations.
        length: weight of the embeddings' lengths; default: the paper's, 1, or 25 with l2_l1.
        lm_weight: of the language model; default: the paper's, 0.2, or 60 with l2_l1; 0: none is used.
        lm: auxiliary, a small GPT-2 trained on auxiliary text (at most lm_steps steps), or a model on Hugging Face's hub.
        lm_folder: folder of a causal model that replaces lm.
        draws, orders: random starts, and random orders of the best start's words; the nearest to the update is used.
        discrete: words move every period iterations (alternating), only at the end, or never (none).
        candidates: orders proposed each time.
        known_tokens: use only words whose embeddings have a gradient; that gradient must be shared.
        published: as the published code does, without this package's corrections (fedgauge.attacks.text.text_matching).
    """
    lengths, nll = WEIGHTS[loss]
    return TextMatching(
        kind=loss,
        l1=l1,
        optimizer=staircase(rate, decay=decay, stride=stride),
        length=lengths if length is None else length,
        lm_weight=nll if lm_weight is None else lm_weight,
        lm=lm,
        lm_folder=lm_folder,
        training=LanguageModelTraining(steps=lm_steps),
        draws=draws,
        orders=orders,
        discrete=discrete,
        period=period,
        candidates=candidates,
        known_tokens=known_tokens,
        published=published,
    )
