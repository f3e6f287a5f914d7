"""Intervals agree with scipy, and hold the mean as often as they say."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from fedgauge.server.views.intervals import Rate, clustered_interval, guessed_labels, luck_bound, luck_of_hits


@pytest.mark.parametrize("clients", [2, 3, 40])
def test_the_interval_is_students_where_every_client_has_one_example(clients: int) -> None:
    values = np.random.default_rng(1).gamma(2.0, 5.0, clients)
    theirs = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert clustered_interval(values, np.arange(clients)) == pytest.approx(tuple(theirs))


@pytest.mark.parametrize("clients", [2, 3, 4, 6, 10])
@pytest.mark.parametrize("sizes", ["equal", "unequal"])
def test_the_interval_holds_the_mean_as_often_as_it_says(clients: int, sizes: str) -> None:
    """A percentile bootstrap over clients would hold it in 51, 74, 82, 85, 88 % of the cases."""
    rng, worlds = np.random.default_rng(0), 4000
    counts = np.full(clients, 4) if sizes == "equal" else 3 + np.arange(clients) % 3
    cluster = np.repeat(np.arange(clients), counts)
    held = 0
    for _ in range(worlds):
        values = 20 + rng.normal(0, 3, clients)[cluster] + rng.normal(0, 2, len(cluster))
        interval = clustered_interval(values, cluster)
        assert interval is not None
        held += interval[0] <= 20 <= interval[1]
    assert 0.935 <= held / worlds <= 0.965  # four standard errors are .014


def test_examples_of_one_client_are_no_new_evidence() -> None:
    rng = np.random.default_rng(3)
    levels = rng.normal(20, 3, 12)
    once = clustered_interval(levels, np.arange(12))
    often = clustered_interval(np.repeat(levels, 50), np.repeat(np.arange(12), 50))
    assert once is not None
    assert often == pytest.approx(once)


@given(st.lists(st.tuples(st.integers(0, 5), st.floats(0, 100)), min_size=2, max_size=40))
def test_the_interval_of_a_share_stays_within_it(graded: list[tuple[int, float]]) -> None:
    """A report said "57.6 to 109.9 %"."""
    clients, values = np.array([client for client, _ in graded]), np.array([value for _, value in graded])
    interval, students = (clustered_interval(values, clients, whole=whole) for whole in (100.0, None))
    if interval is None or students is None:
        assert interval is students and len(set(clients)) == 1
        return
    assert 0 <= interval[0] <= values.mean() + 1e-9 and values.mean() - 1e-9 <= interval[1] <= 100
    if students[1] - students[0] < 0.1 and 5 < values.mean() < 95:
        assert interval == pytest.approx(students, abs=0.01), "where Student's is narrow the two are one"


def test_the_interval_of_a_share_is_wilsons_of_as_many_clients() -> None:
    """Clients of one example each: Student's quantile for the normal one, and a client less."""
    hits, k = 17, 20
    found = clustered_interval((np.arange(k) < hits).astype(float), np.arange(k), whole=1.0)
    z2, p = float(scipy.stats.t.ppf(0.975, k - 1)) ** 2 / (k - 1), hits / k
    ends = np.roots([1 + z2, -(2 * p + z2), p * p])  # (p - share)^2 = z^2 share (1 - share) / n
    assert found == pytest.approx(tuple(sorted(ends.real)))


@pytest.mark.parametrize("clients", [3, 5, 10])
def test_the_interval_of_a_share_holds_it_as_often_as_it_says(clients: int) -> None:
    """Of nine in ten, in clients of forty that differ: Student's would hold it in 94, 93, 95 %, beyond 100 % in part."""
    rng, worlds, cluster = np.random.default_rng(0), 2000, np.repeat(np.arange(clients), 40)
    shares = rng.beta(45, 5, (worlds, clients))
    hits = (rng.random((worlds, len(cluster))) < shares[:, cluster]).astype(float)
    intervals = [clustered_interval(values, cluster, whole=1.0) for values in hits]
    held = sum(interval is not None and interval[0] <= 0.9 <= interval[1] for interval in intervals)
    assert 0.93 <= held / worlds <= 0.985  # four standard errors are .02


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys(counted: tuple[int, int]) -> None:
    count, n = counted
    theirs = scipy.stats.binomtest(count, n).proportion_ci(0.95, method="wilson")
    assert Rate(count, n).interval == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_a_rate_of_nothing() -> None:
    assert (Rate(0, 0).fraction, Rate(0, 0).interval) == (None, (0.0, 1.0))


def test_labels_restored_by_a_guess_by_hand() -> None:
    assert guessed_labels([0.1] * 10, 1) == pytest.approx(0.1)
    assert guessed_labels([0.1] * 10, 4) == pytest.approx(1 - 0.9**4), "four different classes, each there or not"
    assert guessed_labels([0.5, 0.5], 4) == pytest.approx((1 * 4 + 2 * 11) / 16 * 2 / 4), "two of each"
    assert guessed_labels([0.9, 0.1], 2) == pytest.approx(0.9), "twice the common one"
    assert guessed_labels([1.0], 3) == 1.0


@given(st.integers(1, 30), st.floats(0.01, 0.99), st.data())
def test_luck_is_never_less_probable_than_its_bound(n: int, expected: float, data: st.DataObject) -> None:
    reached = data.draw(st.integers(0, n))
    exact = scipy.stats.binom.sf(reached - 1, n, expected)
    assert luck_bound(reached / n, expected, n) >= exact * (1 - 1e-9)


def test_the_luck_of_hits_is_fishers_exact_test() -> None:
    assert luck_of_hits(Rate(4, 4), Rate(0, 4)) == pytest.approx(1 / 70)
    assert luck_of_hits(Rate(1, 2), Rate(1, 2)) == pytest.approx(5 / 6)
    assert luck_of_hits(Rate(0, 4), Rate(3, 4)) == 1.0
    assert luck_of_hits(Rate(9, 12), Rate(5, 16)) == pytest.approx(
        scipy.stats.fisher_exact([[9, 3], [5, 11]], alternative="greater").pvalue
    )
