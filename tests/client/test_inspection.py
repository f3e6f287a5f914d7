"""Inspection: what an honest federation sends passes, and what is bent is named by layer and reason."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fedgauge.client.inspection.policy import FIRST_NETWORK, InspectionPolicy, fingerprint, inspect
from fedgauge.client.inspection.probes import PROBE, ProbeSet, probe_examples
from fedgauge.client.inspection.results import LARGEST, THRESHOLDS, DetectorResult, DetectorResults
from fedgauge.client.inspection.weights import FEWEST, MOST_ROWS, inspect_weights
from fedgauge.client.models.vision import convnet, detached_params, lenet, mlp, resnet20
from fedgauge.client.rng import generator
from fedgauge.client.training import gradient
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Batch, Params
from tests.conftest import MakeFederation

SHAPE, CLASSES = (1, 12, 12), 5


def network(seed: int = 0, hidden: tuple[int, ...] = (40,)) -> nn.Module:
    torch.manual_seed(seed)
    return mlp(SHAPE, CLASSES, hidden=list(hidden))


def examples(n: int = PROBE, seed: int = 0) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(n, *SHAPE, generator=rng), torch.arange(n) % CLASSES)


def probes(model: nn.Module | None = None, probe: Batch | None = None) -> ProbeSet:
    return ProbeSet(network() if model is None else model, examples() if probe is None else probe, F.cross_entropy)


def with_(params: Params, **changed: Tensor) -> Params:
    names = {name.replace(".", "_"): name for name in params}
    return {**params, **{names[name.removeprefix("p")]: t for name, t in changed.items()}}


def alarmed(found: DetectorResults) -> dict[str, DetectorResult]:
    return {f.detector: f for f in found.alarms}


def score(found: DetectorResults, detector: str) -> float:
    return next(f.score for f in found.found if f.detector == detector)


@pytest.mark.parametrize("build", [mlp, lenet, convnet, resnet20])
def test_fresh_weights_of_the_papers_networks_pass(build: object) -> None:
    torch.manual_seed(1)
    model = build((3, 16, 16), 10, **({"width": 8} if build is convnet else {}))  # type: ignore[operator]
    rng = torch.Generator().manual_seed(2)
    probe = Batch(torch.rand(16, 3, 16, 16, generator=rng), torch.arange(16) % 10)
    params = detached_params(model)
    nearby = {
        k: t + 0.01 * t.std() * torch.randn(t.shape, generator=rng) if t.numel() > 1 else t for k, t in params.items()
    }
    found = inspect(probes(model, probe), nearby, params, agreed=fingerprint(model))
    assert found.suspicion < 1, found.why
    narrow = {"isolated units"} if build is lenet else set()  # of layers that wide it has none
    assert {f.detector for f in found.found} == set(THRESHOLDS) - narrow
    assert not found.why


def test_everything_is_left_as_it_was() -> None:
    model = convnet((3, 9, 9), 4, width=2).train()
    probe = Batch(torch.rand(9, 3, 9, 9), torch.arange(9) % 4)
    params = detached_params(model)
    before = {k: t.clone() for k, t in {**params, **dict(model.named_buffers())}.items()}
    inspect(probes(model, probe), params, params)
    assert all(m.training for m in model.modules())
    assert all(not m._forward_pre_hooks for m in model.modules())
    after = {**params, **dict(model.named_buffers())}
    assert all(torch.equal(before[k], after[k]) for k in before)


# ---------------------------------------------------------------------------------------------------------- by weights


@given(scale=st.floats(1e-3, 1e3), share=st.floats(0.2, 1.0))
def test_rows_that_are_multiples_of_one_another_are_found_at_any_scale(scale: float, share: float) -> None:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 144, generator=rng)
    copies = math.ceil(share * 40)
    weight[:copies] = scale * weight[0] * (1 + torch.rand(copies, 1, generator=rng))
    (found,) = [f for f in inspect_weights({"w": weight}, None) if f.detector == "dependent rows"]
    assert found.ratio >= 1
    assert found.score == pytest.approx(copies / 40)
    assert f"{copies} another's multiple" in found.words


def test_combinations_of_few_rows_lack_rank() -> None:
    """No two rows of a rank-4 matrix are parallel; 36 of its 40 singular values are zero."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 4, generator=rng) @ torch.randn(4, 144, generator=rng)
    (found,) = [f for f in inspect_weights({"w": weight}, None) if f.detector == "dependent rows"]
    assert found.score == pytest.approx(0.9)
    assert "0 another's multiple" in found.words


def test_zeroed_rows_of_the_classifier_are_counted() -> None:
    params = detached_params(network())
    altered = with_(params, p3_weight=torch.where(torch.arange(CLASSES)[:, None] == 2, params["3.weight"], 0.0))
    found = alarmed(inspect(probes(), altered, None))["dependent rows"]
    assert (found.layer, found.score) == ("3.weight", 0.8)
    assert found.words.startswith("4 rows of 5 are zero")


def trapped(rows: int, inputs: int, part: float = 0.95) -> Tensor:
    """Rows with a random half of the entries negative and the positives a little smaller (Boenisch et al., 2023)."""
    rng = torch.Generator().manual_seed(3)
    signs = torch.stack([torch.randperm(inputs, generator=rng) < inputs // 2 for _ in range(rows)])
    return torch.where(signs, -1.0, part) * torch.randn(rows, inputs, generator=rng).abs()


@pytest.mark.parametrize("inputs", [144, 145])
def test_trap_weights_are_too_balanced_to_be_random(inputs: int) -> None:
    (found,) = [f for f in inspect_weights({"w": trapped(40, inputs)}, None) if f.detector == "balanced rows"]
    # each row by chance with probability C(n, n/2) / 2^n (two of them for odd n): the bound is exact where all are
    by_chance = math.comb(inputs, inputs // 2) / 2**inputs * (1 + inputs % 2)
    assert found.score == pytest.approx(-40 * math.log10(by_chance), rel=1e-6)
    assert found.ratio > 1


def test_random_rows_are_seldom_called_balanced() -> None:
    """A threshold of 6 is a chance of one in a million; of 300 layers none comes near."""
    rng = torch.Generator().manual_seed(0)
    worst = 0.0
    for inputs in (8, 9, 25, 144):
        for _ in range(75):
            layer = {"w": torch.randn(64, inputs, generator=rng)}
            worst = max(worst, *(f.score for f in inspect_weights(layer, None) if f.detector == "balanced rows"))
    assert worst < 5


def test_identity_convolutions_are_sparse() -> None:
    weight = torch.zeros(12, 12, 5, 5)
    weight[:, :, 2, 2] = torch.eye(12)
    weight += 1e-4 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    (found,) = [f for f in inspect_weights({"conv.weight": weight}, None) if f.detector == "sparse rows"]
    assert found.score == 1
    one = torch.randn(12, 12, 5, 5, generator=torch.Generator().manual_seed(0))
    one[0] = weight[0]
    (found,) = [f for f in inspect_weights({"conv.weight": one}, None) if f.detector == "sparse rows"]
    assert found.score == 1, "one row that carries a colour is enough"
    assert found.words.endswith("of 1 rows a single one")
    spread = torch.randn(12, 12, 5, 5, generator=torch.Generator().manual_seed(0))
    assert [f.score for f in inspect_weights({"w": spread}, None) if f.detector == "sparse rows"] == [0]


def test_a_swap_of_two_classes_is_two_rows_that_moved() -> None:
    params = detached_params(network())
    order = [1, 0, 2, 3, 4]
    altered = with_(params, p3_weight=params["3.weight"][order], p3_bias=params["3.bias"][order])
    found = alarmed(inspect(probes(), altered, params))
    assert found["moved rows"].layer == "3.weight"
    assert found["moved rows"].words.startswith("2 rows")
    assert "moved rows" not in alarmed(inspect(probes(), altered, None)), "a first round has nothing to compare with"


def test_a_jump_is_measured_in_the_layers_own_size_and_by_the_rounds_between() -> None:
    params = detached_params(network())
    altered = with_(params, p1_weight=3 * params["1.weight"], p1_bias=3 * params["1.bias"])
    found = inspect(probes(), altered, params)
    assert score(found, "jump") == pytest.approx(2.0)
    assert alarmed(found)["jump"].layer == "1"
    assert score(inspect(probes(), altered, params, apart=4), "jump") == pytest.approx(0.5)


def test_weights_out_of_nothing_have_the_largest_jump() -> None:
    params = {"w": torch.ones(2, 2)}
    before = {"w": torch.zeros(2, 2)}
    assert [f.score for f in inspect_weights(params, before) if f.detector == "jump"] == [LARGEST]
    assert [f.score for f in inspect_weights(before, before) if f.detector == "jump"] == [0]


@pytest.mark.parametrize("entry", [math.nan, math.inf])
def test_weights_that_are_no_numbers_are_an_alarm(entry: float) -> None:
    params = detached_params(network())
    for name in ("1.weight", "3.bias"):
        altered = {k: t.clone() for k, t in params.items()}
        altered[name].view(-1)[0] = entry
        found = inspect(probes(), altered, params)
        assert found.suspicion >= 1 and math.isfinite(found.suspicion)
    wrong = inspect_weights({"w": torch.where(torch.eye(20) > 0, entry, 1.0)}, None)
    assert alarmed(DetectorResults.of(wrong))["dependent rows"].words == "it has entries that are not finite"


def copies(rows: Tensor, of: int) -> Params:
    """A layer of more rows than are compared, some of them one and the same."""
    weight = torch.randn(of, 16, generator=torch.Generator().manual_seed(0))
    weight[rows] = weight[0].clone()
    return {"w": weight}


@given(seed=st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_in_no_rows_of_a_large_matrix_can_copies_hide(seed: int) -> None:
    """Half of the rows are copies: all that any fixed stride of two leaves out."""
    of = 2 * MOST_ROWS
    for rows in (torch.arange(1, of, 2), torch.arange(0, of, 2), torch.arange(MOST_ROWS), torch.arange(MOST_ROWS, of)):
        found = DetectorResults.of(inspect_weights(copies(rows, of), None, rng=generator(seed)))
        assert score(found, "dependent rows") == pytest.approx(0.5, abs=0.1)  # six deviations of a hypergeometric


def test_rows_are_drawn_by_the_clients_entropy_unless_a_generator_is_given() -> None:
    weights = copies(torch.arange(0, 2 * MOST_ROWS, 2), 2 * MOST_ROWS)

    def words(seed: int | None) -> str:
        rng = None if seed is None else generator(seed)
        (found,) = [f for f in inspect_weights(weights, None, rng=rng) if f.detector == "dependent rows"]
        return found.words

    assert words(1) == words(1)
    assert len({words(seed) for seed in range(5)}) > 1
    assert len({words(None) for _ in range(8)}) > 1


@pytest.mark.parametrize("n", [MOST_ROWS, 2 * MOST_ROWS + 1])
def test_rows_of_a_large_matrix_that_moved_are_found_wherever_they_went(n: int) -> None:
    """All rows move by one: where a row is drawn, the place it came from need not be."""
    before = torch.randn(n, 64, generator=torch.Generator().manual_seed(0))
    moved = DetectorResults.of(inspect_weights({"w": before.roll(1, 0)}, {"w": before}, rng=generator(0)))
    assert alarmed(moved)["moved rows"].words.startswith(f"{MOST_ROWS} rows are nearer")
    still = DetectorResults.of(inspect_weights({"w": before}, {"w": before}, rng=generator(0)))
    assert score(still, "moved rows") == 0


def test_rows_of_any_size_are_compared() -> None:
    before = 1e25 * torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    moved = DetectorResults.of(inspect_weights({"w": before.roll(1, 0)}, {"w": before}))
    assert "moved rows" in alarmed(moved)


def test_embeddings_are_no_layers() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(100, 16)
            self.head = nn.Linear(16, 3)
            nn.init.ones_(self.words.weight)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(self.words(x).mean(1))
            return logits

    torch.manual_seed(0)
    model = Words()
    probe = Batch(torch.arange(48).reshape(8, 6) % 12, torch.arange(8) % 3)
    found = inspect(probes(model, probe), detached_params(model), None)
    assert {f.layer for f in found.found if f.detector == "dependent rows"} == {"head.weight"}
    assert found.suspicion < 1, "nor are words dead that do not occur"


# --------------------------------------------------------------------------------------------------------- by examples


def test_a_bias_is_held_against_what_the_layer_is_fed() -> None:
    """Inputs of root mean square 2 and a row of norm 3 make about 6: a bias of 600 is a hundred times that."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 9))
    params = {"1.weight": torch.full((9, 16), 0.75), "1.bias": torch.zeros(9)}
    params["1.bias"][4] = -600.0
    probe = Batch(torch.full((1, 1, 4, 4), 2.0), torch.zeros(1, dtype=torch.int64))
    found = inspect(probes(model, probe), params, None)
    assert score(found, "extreme biases") == pytest.approx(100)
    assert "its bias 4 is 100 times" in found.why


def test_a_dead_layer_is_found_by_any_client() -> None:
    params = detached_params(network(hidden=(40, 30)))
    model = network(hidden=(40, 30))
    altered = with_(params, p3_bias=torch.full((30,), -100.0))
    found = alarmed(inspect(probes(model), altered, None))
    assert {"dead layer", "extreme biases"} <= found.keys()
    assert found["dead layer"].score == pytest.approx(math.log10(LARGEST))


def test_dead_units_are_counted() -> None:
    params = detached_params(network())
    bias = params["1.bias"].clone()
    bias[:38] = -30.0
    found = inspect(probes(), with_(params, p1_bias=bias), None)
    assert score(found, "dead units") == pytest.approx(38 / 40)


def per_example_norms(model: nn.Module, params: Params, batch: Batch, name: str) -> Tensor:
    compute = gradient(model)
    each = [compute(params, Batch(x[None], y[None]), None)[name].norm() for x, y in zip(*batch, strict=True)]
    return torch.stack(each).double()


def test_domination_is_the_published_ratio() -> None:
    """D-SNR of a layer: the largest example's gradient norm over the root of the others' squares, one by one in a loop."""
    model, probe = network(), examples(9)
    params = detached_params(model)
    loud = Batch(probe.x.clone(), probe.y)
    loud.x[3] *= 1e4
    norms = per_example_norms(model, params, loud, "1.weight").square()
    expected = math.sqrt(float(norms.max() / (norms.sum() - norms.max())))
    found = alarmed(inspect(probes(model, loud), params, None))["dominated"]
    assert expected > THRESHOLDS["dominated"]
    assert found.score >= expected * (1 - 1e-5), "it is the worst layer's"
    assert "one example's gradient is" in found.words


@pytest.mark.parametrize("size", [1e15, 1e22, 1e30])
def test_domination_is_seen_however_large_the_gradient(size: float) -> None:
    """Squares of 1e22 are no single-precision numbers; a gradient that is none is worse than any."""
    model, probe = network(), examples(9)
    probe.x[3] *= size
    found = alarmed(inspect(probes(model, probe), detached_params(model), None))["dominated"]
    assert found.score == LARGEST


def test_an_example_that_is_large_but_not_alone_dominates_nothing() -> None:
    """All nine as large: no one is nine times the others, and their squares are no single-precision numbers."""
    model, probe = network(), examples(9)
    found = inspect(probes(model, Batch(probe.x * 1e22, probe.y)), detached_params(model), None)
    assert score(found, "dominated") < THRESHOLDS["dominated"]


def test_what_was_usual_before_is_no_alarm() -> None:
    model, probe = network(), examples(9)
    params = detached_params(model)
    probe.x[3] *= 1e4
    assert "dominated" not in alarmed(inspect(probes(model, probe), params, params))


@pytest.mark.parametrize("n", [1, FEWEST - 1])
def test_of_few_examples_it_is_not_said_who_dominates(n: int) -> None:
    found = inspect(probes(probe=examples(n)), detached_params(network()), None)
    silent = {"dominated", "vanished", "isolated units"}
    assert silent.isdisjoint(f.detector for f in found.found)
    assert found.suspicion < 1


def test_one_class_fished_out_leaves_the_others_without_a_gradient() -> None:
    """The classifier's other rows are zero and its logit far below: whoever is not of class 2 has no gradient in front of it."""
    params = detached_params(network())
    keep = torch.arange(CLASSES) == 2
    altered = with_(
        params,
        p3_weight=torch.where(keep[:, None], params["3.weight"], 0.0),
        p3_bias=torch.where(keep, -40.0, 0.0),
    )
    found = alarmed(inspect(probes(), altered, params))
    assert found["vanished"].score == pytest.approx(26 / 32), "6 of 32 examples are of class 2"
    assert {"dependent rows", "vanished", "jump"} <= found.keys()


def test_units_that_learn_from_one_example_each_are_isolated() -> None:
    """A layer with one row for each example, on for it alone."""
    probe = Batch(torch.eye(16).reshape(16, 1, 4, 4), torch.arange(16) % CLASSES)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    torch.manual_seed(0)
    params = {**detached_params(model), "1.weight": torch.eye(16), "1.bias": torch.full((16,), -0.5)}
    found = alarmed(inspect(probes(model, probe), params, None))["isolated units"]
    assert found.score == 1


def test_a_loss_that_leaps_is_told_in_numbers() -> None:
    params = detached_params(network())
    altered = with_(params, p3_weight=1e3 * params["3.weight"])
    model = network()
    here, then = (
        F.cross_entropy(torch.func.functional_call(model, p, (examples().x,)), examples().y) for p in (altered, params)
    )
    found = alarmed(inspect(probes(), altered, params))["loss"]
    assert found.score == pytest.approx(math.log(here / then), rel=1e-4)


def test_memory_is_bounded_by_chunks_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    params = detached_params(network())
    whole = inspect(probes(), params, params)
    monkeypatch.setattr("fedgauge.client.inspection.MOST_FLOATS", 3 * sum(t.numel() for t in params.values()))
    for a, b in zip(whole.found, inspect(probes(), params, params).found, strict=True):
        assert (a.detector, a.layer) == (b.detector, b.layer)
        assert a.score == pytest.approx(b.score, rel=1e-4, abs=1e-7)


# ---------------------------------------------------------------------------------------------------- the architecture


def test_the_fingerprint_is_of_the_tree_and_not_of_the_values() -> None:
    assert fingerprint(network(0)) == fingerprint(network(1))
    assert len({fingerprint(network(0, hidden)) for hidden in ((40,), (41,), (40, 40))}) == 3
    torch.manual_seed(0)
    relu, tanh = (mlp(SHAPE, CLASSES, hidden=[4], activation=a) for a in ("relu", "tanh"))  # type: ignore[arg-type]
    assert fingerprint(relu) != fingerprint(tanh), "of equal shapes"
    assert fingerprint(nn.MaxPool2d(2)) != fingerprint(nn.MaxPool2d(3)), "and of no tensor at all"


def test_another_network_than_agreed_is_an_alarm_whatever_its_weights() -> None:
    model = network()
    found = inspect(probes(model), detached_params(model), None, agreed=fingerprint(lenet(SHAPE, CLASSES)))
    assert alarmed(found).keys() == {"architecture"}
    assert fingerprint(model) in found.why


# --------------------------------------------------------------------------------------------------- from round to round


def test_a_client_compares_with_the_last_weights_that_raised_no_alarm() -> None:
    params = detached_params(network())
    swapped = with_(params, p3_weight=params["3.weight"].flip(0), p3_bias=params["3.bias"].flip(0))
    memory: TransformState = {}
    inspection_policy = InspectionPolicy("refuse")
    assert not inspection_policy.findings(probes(), params, 1, memory).alarms
    for round in (2, 3):
        assert "moved rows" in alarmed(inspection_policy.findings(probes(), swapped, round, memory)), (
            "not taken for normal by repetition"
        )
    assert not inspection_policy.findings(probes(), params, 4, memory).alarms
    kept = {k.removeprefix("params."): t for k, t in memory.items() if k.startswith("params.")}
    assert kept.keys() == params.keys()
    assert memory.keys() == {*(f"params.{k}" for k in params), "round", FIRST_NETWORK}


@pytest.mark.parametrize("round", [2, 400, 10**9])
def test_the_number_that_the_server_gives_a_round_does_not_excuse_a_jump(round: int) -> None:
    params = detached_params(network())
    altered = with_(params, p1_weight=8 * params["1.weight"], p1_bias=8 * params["1.bias"])
    inspection_policy, memory = InspectionPolicy("refuse"), TransformState()
    assert not inspection_policy.findings(probes(), params, 1, memory).alarms
    found = inspection_policy.findings(probes(), altered, round, memory)
    assert alarmed(found)["jump"].score == pytest.approx(7 / min(round - 1, 5))


def test_what_is_kept_is_not_the_senders_tensor() -> None:
    params = detached_params(network())
    memory: TransformState = {}
    InspectionPolicy("log").findings(probes(), params, 1, memory)
    params["3.weight"].zero_()
    assert bool(memory["params.3.weight"].any())


def test_the_first_rounds_network_is_the_agreed_one_unless_the_owner_names_it() -> None:
    memory: TransformState = {}
    model, other = network(), network(hidden=(40, 40))
    assert not InspectionPolicy("warn").findings(probes(model), detached_params(model), 1, memory).alarms
    found = InspectionPolicy("warn").findings(probes(other), detached_params(other), 2, memory)
    assert alarmed(found).keys() == {"architecture"}, "nor are weights of another network compared"
    named = InspectionPolicy("warn", architecture=fingerprint(other))
    assert not named.findings(probes(other), detached_params(other), 3, memory).alarms
    assert alarmed(named.findings(probes(model), detached_params(model), 1, {})).keys() == {"architecture"}


def test_without_examples_the_verdict_is_the_same_whatever_they_are() -> None:
    params = detached_params(network())
    loud = Batch(examples().x * torch.where(torch.arange(PROBE) == 0, 1e6, 1.0).view(-1, 1, 1, 1), examples().y)
    assert InspectionPolicy("refuse").findings(probes(probe=loud), params, 1, {}).alarms
    blind = InspectionPolicy("refuse", examples=False)
    one, two = (blind.findings(probes(probe=p), params, 1, {}) for p in (loud, examples()))
    assert one == two
    assert not one.alarms


def test_a_probe_is_the_rounds_batch_and_more_of_the_clients_own(make_federation: MakeFederation) -> None:
    shards = make_federation(data={"use": "mnist5k", "batch_size": 1}).shards
    rows = shards.rows_at(1, 3)
    probe = probe_examples(shards, 1, rows)
    assert probe.x.shape == (PROBE, 1, 28, 28)
    assert torch.equal(probe.x[:1], shards.batch_at(1, 3).x)
    mine = {bytes(x.numpy().tobytes()) for x in shards.dataset.x[shards.indices[1]].float().div(255)}
    assert len({bytes(x.numpy().tobytes()) for x in probe.x} & mine) == PROBE
    few = replace(shards, indices=(shards.indices[0], shards.indices[1][:5]))
    assert len(probe_examples(few, 1, few.indices[1][:1]).y) == 5
    assert len(probe_examples(shards, 1, shards.indices[1][:50]).y) == PROBE


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_the_largest(wrong: float) -> None:
    for order in (1, -1):
        both = [DetectorResult("jump", "a", 0.1, "x"), DetectorResult("jump", "b", wrong, "y")][::order]
        found = DetectorResults.of(iter([*both, DetectorResult("loss", "", 0.1, "z")]))
        assert [(f.layer, f.score) for f in found.alarms] == [("b", LARGEST)]
        assert found.found[0].layer == "b"


def test_findings_are_sorted_by_suspicion() -> None:
    found = DetectorResults.of(
        iter(
            [
                DetectorResult("jump", "a", 0.1, "x"),
                DetectorResult("jump", "b", 0.3, "y"),
                DetectorResult("dominated", "", 30.0, "z"),
            ]
        )
    )
    assert [(f.detector, f.layer) for f in found.found] == [("dominated", ""), ("jump", "b")]
    assert found.suspicion == pytest.approx(3)
    assert found.why == "the network: z"
    assert DetectorResults(()).suspicion == 0
