"""The preflight: estimate in seconds, before any training, what a scenario would leak and what to change.

Simulated clients hold auxiliary images; the clients' data is not read. The preflight counts unknowns and equations, tries the
attacks that need no search on updates behind the whole chain, and computes the limit.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from fedgauge.attacks.gaussian_prior import class_means, public_priors
from fedgauge.attacks.grading.audit import Auditor
from fedgauge.attacks.limits import bayes_limit, noise_is_known
from fedgauge.attacks.membership.gradients import CandidateGradients
from fedgauge.attacks.membership.limit import detectability, power
from fedgauge.attacks.modality.image_metrics import PSNR_CAP
from fedgauge.attacks.modality.registry import MEASURED
from fedgauge.attacks.plan import PlannedAttack, modalities_of
from fedgauge.attacks.source import PublicSource
from fedgauge.client.chain import trained_on
from fedgauge.client.collusion import tolerance
from fedgauge.client.federation import UNMIXED
from fedgauge.client.models.language import LanguageModel
from fedgauge.client.psnr import in_db
from fedgauge.client.rng import generator
from fedgauge.client.transforms import is_identity
from fedgauge.client.update import Batch
from fedgauge.defenses.accounting import privacy_statement
from fedgauge.server.store.scenario import Scenario
from fedgauge.server.views.formatting import decibel, in_unit, percent

SIMULATED = 8  # clients, with batches of auxiliary images
LAYER_BY_LAYER = "recursive"
SOLVED = 2  # of them layer by layer: 3 to 9 CPU seconds each for a LeNet of digits
STRONG = 8.0  # epsilon of a record, up to which the guarantee means something
FAINT = 0.05  # true positives at 1 % false positives, up to which membership hardly shows
TESTED = 512  # auxiliary images on which the mean image is measured
Severity = Literal["leaks", "weak", "unknown", "note", "holds"]
_STYLES = dict(leaks="bold red", weak="yellow", unknown="yellow", note="", holds="green")


@dataclass(frozen=True)
class Finding:
    """One finding: how bad it is, what it is, and what to change (empty: nothing)."""

    severity: Severity
    words: str
    change: str = ""


def closed_forms(scenario: Scenario) -> list[Finding]:
    """Examine only what attacks without a search read, in seconds; each layer's open dimensions are named."""
    return list(_Probe(scenario).closed_forms())


def preflight(scenario: Scenario) -> list[Finding]:
    """Examine a checked scenario, which takes some seconds; the worst findings come first."""
    return sorted(_Probe(scenario).findings(), key=lambda f: list(_STYLES).index(f.severity))


class _Probe:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.fed = scenario, scenario.federation
        self.source = PublicSource(self.fed, count=SIMULATED)
        self.auditor, self.size = Auditor(self.source, scenario.plan.seed), self.source.size
        self.batches, self.wave, self.params = self.source.batches, self.source.all, self.source.all.params
        self.exact = False  # a closed form reads examples exactly

    def findings(self) -> Iterator[Finding]:
        model = self.fed.model
        yield from self._word_embeddings(model) if isinstance(model, LanguageModel) else self._structure()
        yield from self.closed_forms()
        # without labels of their own, sentences' labels are the sentences
        if self.fed.shards.dataset.labelled and (labels := self._labels()) is not None:
            yield labels
        yield from self._chain()
        if self.auditor.modality.limits:
            yield self._limit()
        yield self._membership()
        yield self._epsilon()

    def _word_embeddings(self, model: LanguageModel) -> Iterator[Finding]:
        """Compare the nonzero rows of the word embeddings' gradient with the words."""
        seen = self.wave.update.get(model.parts.word)
        if seen is None or model.parts.tied:
            frozen = "the word embeddings are frozen, so no row of their gradient names a word"
            tied = "the head shares the word embeddings: every row has a gradient, whether its word occurs or not"
            yield Finding("note", frozen if seen is None else tied)
            return
        rows = [set(t.flatten(1).any(1).nonzero().flatten().tolist()) for t in seen]
        right = sum(map(set.__eq__, rows, (set(_fed(b, model.pad).tolist()) for b in self.batches)))
        words = f"nonzero rows of the word embeddings' update are the words of {right} of {len(rows)} simulated clients"
        change = '[model] freeze = ["words"], or noise after local_sgd'
        yield Finding("leaks", words, change) if right else Finding("note", words)

    def _structure(self) -> Iterator[Finding]:
        """Compare the numbers of unknowns and equations, and find layers with revealing gradients."""
        unknowns = self.size * math.prod(self.fed.shards.dataset.shape)
        visible = sum(int(t.count_nonzero()) for t in self.wave.update.values()) // SIMULATED
        noun, count = self.auditor.modality.parts, "1 example" if self.size == 1 else f"{self.size} examples"
        words = f"{visible:,} entries of an update are not zero, for {unknowns:,} unknown {noun} of {count}"
        if visible >= unknowns:
            noise = ", but for the noise" if noise_is_known(self.fed) else ""
            yield Finding("weak", f"{words}: enough to determine them{noise}", "larger batches and more noise")
        else:
            yield Finding("note", f"{words}: too few to determine them without a prior, such as the one of images")
        modules = dict(self.fed.model.named_modules())
        for name in (name for name, module in modules.items() if isinstance(module, nn.Embedding)):
            words = f"layer {name!r} is an embedding: the nonzero rows of its gradient name the tokens"
            yield Finding("leaks", words, "freeze it (freeze)")
        norms = [n for n, m in modules.items() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
        if norms:
            words = f"BatchNorm in train mode ({norms[0]!r}): the batch's means and variances are uploaded unchanged"
            yield Finding("leaks", words, UNMIXED)

    def closed_forms(self) -> Iterator[Finding]:
        """Results of the closed forms; layer by layer, which takes seconds, only where no layer's gradient holds the example."""
        first = "analytic" if self.size == 1 else "read_rows"
        found = [
            *self._closed_form(first, "the first fully connected layer's gradient"),
            *self._closed_form("patch_embedding", "the gradient of the patches' and positions' embeddings"),
        ]
        yield from found
        if self.size == 1 and not found:
            yield from self._closed_form(LAYER_BY_LAYER, "the chain of all layers' gradients", SOLVED)

    def _closed_form(self, use: str, where: str, count: int = SIMULATED) -> Iterator[Finding]:
        if type(self.auditor.modality) not in modalities_of(use):
            return
        results = self.auditor.attack(PlannedAttack(use, {"use": use}), self.wave.of(range(count)), self.source.members)
        grader, main = self.auditor.grader, self.auditor.modality.main
        values = [v for (r, _), b in zip(results, self._trained_on(), strict=False) for v in grader.leaked(r, b)]
        open_ = next((f"; {r.reason}" for r, _ in results if r.reason), "")
        if not values:
            if use == LAYER_BY_LAYER:
                yield Finding("note", f"{use} cannot solve the network layer by layer{open_}")
            return
        mean = sum(values) / len(values)
        self.exact |= mean >= PSNR_CAP
        if exact := sum(map(main.came_back_whole, values)):
            words = f"{where} holds the {main.private}: read off {exact} of {len(values)} simulated clients ({use}, no search)"
            yield Finding("leaks", words, "add noise to the update")
        else:
            yield Finding("note", f"{use} reads {where} and gets {in_unit(mean, main)} through this chain{open_}")

    def _trained_on(self) -> list[Batch]:
        """The simulated clients' examples as a link has changed them; members of a secure sum train separately."""
        if self.source.members > 1:
            return self.batches
        fed, seed = self.fed, self.fed.protocol.seed
        draws = [generator(seed, "stand-in draws", k) for k in range(SIMULATED)]
        each = zip(self.batches, draws, strict=True)
        return [trained_on(fed.chain, fed.gradient, self.params, batch, draw) or batch for batch, draw in each]

    def _labels(self) -> Finding | None:
        from fedgauge.attacks.label_restoration import restore

        known = self.auditor.knowledge(PlannedAttack("labels", {"use": "idlg"}))
        try:
            restored = restore(self.wave, known)
        except ValueError as error:
            return Finding("note", f"labels cannot be restored: {error}")
        kind = self.fed.label_kind
        each = [kind.scores(b.y, y) for b, y in zip(self.batches, restored, strict=True)]
        right = [scores["label_accuracy"] for scores in each if "label_accuracy" in scores]
        if not right:
            means = "; ".join(f"{MEASURED[m].label}: {sum(s[m] for s in each) / len(each):.2g}" for m in each[0])
            words = f"labels ({kind.noun}) are restored from the classifier's gradient: {means}"
            return Finding("leaks", words) if means else None
        share, chance = sum(right) / len(right), 1 / self.fed.shards.dataset.classes
        words = f"labels: {percent(share)} are read off the classifier's gradient (chance: {percent(chance)})"
        return Finding("leaks" if share > 0.9 else "weak" if share > 3 * chance else "note", words)

    def _chain(self) -> Iterator[Finding]:
        local, chain = self.fed.chain.local, self.fed.chain
        if local.steps > 1:
            words = f"{local.steps} local steps at rate {local.rate:g}: attacks unroll them, or match one gradient (surrogate)"
            yield Finding("note", f"{words}; more steps do not hide anything by themselves")
        together = self.fed.protocol.secure_sum
        protected = self.fed.protocol.model.get("defense") or together
        if not protected and all(link is local or is_identity(link) for link in chain.links):
            words = "the chain has no defense: the result of local training is uploaded unchanged"
            yield Finding("leaks", words, "clip each example and add noise (dp_sgd); see docs/defenses.md")
        if together:
            yield Finding("note", f"the real one is {tolerance(together.group, together.least).words}")

    def _limit(self) -> Finding:
        """Compare the limit of one round with the PSNR of each class's mean auxiliary image."""
        some = Batch(*(t[:TESTED] for t in self.source.auxiliary))
        classes = not some.y.is_floating_point()
        guess = class_means(self.source.auxiliary, some.y) if classes else self.source.auxiliary.x.mean(0)
        floor = in_db(float((guess - some.x).square().mean()))
        guessing = f"guessing the mean image{' of each class' if classes else ''} gets {decibel(floor)} dB"
        if not noise_is_known(self.fed):
            no_noise = "the values that the server sees have no noise of a known density"
            nothing = "a closed form reads examples exactly" if self.exact else no_noise
            words = f"no limit: {nothing}; {guessing}"
            return Finding("weak", words, "noise of a known density (gaussian, dp_sgd)")
        known = self.auditor.knowledge(PlannedAttack("limit", {"use": "idlg"}))
        priors, rng = public_priors(self.fed.shards), generator(self.auditor.seed, "preflight")
        try:
            limit = in_db(bayes_limit(known, self.params, priors, rng))
        except ValueError as error:
            return Finding("note", f"no limit: {error}")
        words = f"limit of one round, estimated for Gaussian images: {decibel(limit)} dB as the PSNR of the mean error"
        if limit < floor + 3:
            return Finding("holds", f"{words}; {guessing}")
        return Finding("weak", f"{words}; {guessing}: there is room for a leak", "more noise, or larger batches")

    def _membership(self) -> Finding:
        """Batch membership in closed form, from the norms of gradients and the noise."""
        known, shards = self.auditor.knowledge(PlannedAttack("limit", {"use": "membership"})), self.fed.shards
        density = known.chain.update_distribution
        if density is not None and not density.noisy:
            words = "batch membership: no noise hides it, as an update moves with each example's gradient"
            return Finding("weak", words, 'noise; measure it with [[attack]] use = "membership"')
        some = Batch(*(t[:SIMULATED] for t in self.source.auxiliary))
        try:
            mu = float(detectability(CandidateGradients(known, self.params, some)).median())
        except ValueError as error:
            return Finding("unknown", f"batch membership: {error}")
        times = max(1.0, self.fed.protocol.rounds * shards.batch_size / min(map(len, shards.indices)))
        once, often = (percent(power(0.01, math.sqrt(n) * mu)) for n in (1, times))
        words = (
            "batch membership: an attacker who knows the others detects half of the members with a probability of "
            f"at least {once} at 1 % false positives, {often} after all rounds"
        )
        if power(0.01, math.sqrt(times) * mu) <= FAINT:
            return Finding("holds", words)
        return Finding("weak", words, "more noise, larger batches, fewer rounds")

    def _epsilon(self) -> Finding:
        rounds = dict.fromkeys(range(self.fed.protocol.clients), self.fed.protocol.rounds)
        statement = privacy_statement(self.fed, rounds, self.scenario.privacy.delta)
        words = f"if every client takes part in every round: {statement.words}"
        if statement.record is None:  # neither a leak nor a guarantee
            return Finding("note", statement.words)
        if statement.record <= STRONG:
            return Finding("holds", words)
        return Finding("weak", words, "more noise, fewer rounds, larger shards")


def _fed(batch: Batch, pad: int) -> Tensor:
    """The words that reach the loss as inputs; with next-word prediction, all but a sentence's last."""
    if batch.labelled:
        return batch.x[batch.x != pad]
    return batch.x[:, :-1][batch.x[:, 1:] != pad]


def show(found: Iterable[Finding], console: Console) -> None:
    findings = Table(box=None, show_header=False, padding=(0, 1))
    for finding in found:
        findings.add_row(Text(finding.severity, style=_STYLES[finding.severity]), finding.words)
        if finding.change:
            findings.add_row("", Text(f"change: {finding.change}", style="dim"))
    console.print(findings)
