"""Base of attacks that read each observation by itself, without a search."""

from abc import abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor

from fedgauge.attacks import label_restoration as labelling
from fedgauge.attacks.base import Attack, Budget, Knowledge, Reconstruction, Streams, Wave, not_applicable

# reads the only observation of a wave, whose labels, if known, are the only ones; ValueError says why it cannot
Reader = Callable[[Wave, Knowledge], Reconstruction]


class EachByItself(Attack):
    """Reads each observation by itself, off its gradients."""

    on_cpu = True

    @abstractmethod
    def readers(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> Sequence[Reader]:
        """Return the reader of the wave's observations; ValueError if there is none."""

    def reconstruct(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> list[Reconstruction]:
        try:
            readers = self.readers(wave, known, budget, streams)
        except ValueError as error:
            return not_applicable(wave, str(error))
        return [_result(read, wave.of([k]), known.alone(k)) for k, read in enumerate(readers)]


def _result(read: Reader, alone: Wave, known: Knowledge) -> Reconstruction:
    why = "the update is zero or not finite"
    if all(bool(t.isfinite().all()) for t in alone.update.values()):
        try:
            result = read(alone, known)
            if result.x is None or bool(result.x.isfinite().all()):
                return result
        except ValueError as error:
            why = str(error)
    return not_applicable(alone, why)[0]


class ClosedForm(EachByItself):
    """Reads every observation in the same way."""

    @abstractmethod
    def reader(self, wave: Wave, known: Knowledge) -> Reader:
        """Return the reader of the wave's observations; ValueError if there is none."""

    def readers(self, wave: Wave, known: Knowledge, budget: Budget, streams: Streams) -> Sequence[Reader]:
        return [self.reader(wave, known)] * len(wave)


def labels_of(alone: Wave, known: Knowledge) -> Tensor | None:
    """The labels (B,) of the only observation; None where they cannot be restored, since images also count without them."""
    try:
        return labelling.restore(alone, known)[0]
    except ValueError:
        return None


def check_one_example(known: Knowledge) -> None:
    """ValueError unless an update is the gradient of one example, up to its scale."""
    if known.batch_size != 1:
        raise ValueError(f"the attack needs one example in each update, and this one sums {known.batch_size}")
    check_steps(known, not known.chain.local.adaptive, "a gradient's magnitudes")


def check_steps(known: Knowledge, fits: bool, needed: str) -> None:
    """ValueError unless the clients' local steps fit; needed: what the attack needs of them."""
    if not fits:
        raise ValueError(f"the attack needs {needed}, and the clients take {known.chain.local.words}")
