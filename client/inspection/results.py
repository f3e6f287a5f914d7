"""Results of detectors: a score for each layer, and the threshold of an alarm."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

LARGEST = 1e6  # scores that are larger, or not finite, become this
# By detector, the score of an alarm: above all scores of honest rounds, on networks and seeds that no reported figure uses.
# Of "jump" that includes a client that trains alone on one example a round; a crafted MLP moves by 5 times its size.
THRESHOLDS: Mapping[str, float] = {
    "architecture": 1.0,
    "dependent rows": 0.15,
    "balanced rows": 6.0,
    "sparse rows": 0.3,
    "jump": 2.5,
    "moved rows": 0.5,
}


@dataclass(frozen=True)
class DetectorResult:
    """One detector's result for one layer ("": for the whole network)."""

    detector: str
    layer: str
    score: float  # at least 0; an alarm at the detector's threshold or above
    description: str

    @property
    def ratio(self) -> float:
        return self.score / THRESHOLDS[self.detector]


@dataclass(frozen=True)
class DetectorResults:
    """Each detector's worst layer, the most suspicious first; detectors without input are left out."""

    results: tuple[DetectorResult, ...]

    @classmethod
    def of(cls, findings: Iterable[DetectorResult]) -> "DetectorResults":
        """The worst of each detector."""
        worst: dict[str, DetectorResult] = {}
        for finding in findings:
            if not math.isfinite(finding.score):  # a comparison with NaN never alarms
                finding = replace(finding, score=LARGEST)
            if finding.detector not in worst or finding.score > worst[finding.detector].score:
                worst[finding.detector] = finding
        return cls(tuple(sorted(worst.values(), key=lambda f: -f.ratio)))

    @property
    def suspicion(self) -> float:
        return max((f.ratio for f in self.results), default=0.0)

    @property
    def alarms(self) -> tuple[DetectorResult, ...]:
        return tuple(f for f in self.results if f.ratio >= 1)

    @property
    def reasons(self) -> str:
        """The alarms in words; empty where there is none."""
        return "; ".join(f"{f.layer or 'the network'}: {f.description}" for f in self.alarms)
