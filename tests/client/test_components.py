"""Component tables: what may be named, what is checked, and what an error says to the author of a wrong table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgauge.attacks.plan import ATTACK
from fedgauge.client.components import (
    ComponentKind,
    Count,
    Fraction,
    NotNegative,
    SpecError,
    build,
    call,
    check_arguments,
    coerce,
    resolve,
)
from fedgauge.client.federation import DATASET, TRANSFORM
from fedgauge.client.models.build import MODEL
from fedgauge.client.models.losses import LOSS
from fedgauge.defenses.clip import clip

KINDS = {"dataset": DATASET, "model": MODEL, "loss": LOSS, "transform": TRANSFORM, "attack": ATTACK}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        # of another kind, nowhere, or no component of its module
        ("model", ["mnist5k", "vgg", "detached_params", "nn.Module", "_Block", "_ResNet.forward", None, 3, ""]),
        ("dataset", ["os", "os.system", "data_folder"]),
        ("transform", ["lenet", "..clip", "clip.apply", " clip", "Link", "per_example", "chain", "_Noise"]),
        ("attack", ["Attack", "psnr", "GradientMatching"]),  # the engine; its recipes are components
        # module:name is for packages that are allowed
        ("model", ["os:system", "torchvision.models:resnet18", "a:b:c", "fedgauge.client.models.vision:"]),
        ("transform", ["fedgauge.client.transforms:Link", "fedgauge.defenses.mask:UpdateTransform"]),
    ],
)
def test_a_wrong_name_is_refused(kind: str, names: list[Any]) -> None:
    for name in names:
        with pytest.raises(SpecError) as caught:
            build({"use": name}, "[[table]] #3", KINDS[kind])
        where, told = str(caught.value).split(": ", 1)
        assert where == "[[table]] #3" and (KINDS[kind].names()[0] in told or "did you mean" in told)


@pytest.mark.parametrize(
    ("kind", "misspelt", "meant"),
    [
        ("model", "lennet", "lenet"),
        ("transform", "gausian", "gaussian"),
        ("attack", "attacks.matching:inverting_gradient", "inverting_gradients"),
        ("transform", "transmogrify", None),
    ],
)
def test_a_misspelt_name_gets_the_nearest(kind: str, misspelt: str, meant: str | None) -> None:
    with pytest.raises(SpecError) as caught:
        resolve({"use": misspelt}, "here", KINDS[kind])
    assert (f"'{meant}'?" if meant else ", clip, ") in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"max_nrom": 1.0}, "unknown key 'max_nrom' (it has: max_norm, each); did you mean 'max_norm'?"),
        ({}, "needs the key 'max_norm'"),
        ({"max_norm": "1"}, "max_norm must be a number, got '1'"),
        ({"max_norm": True}, "max_norm"),
        ({"max_norm": [1.0]}, "max_norm"),
        ({"max_norm": float("nan")}, "max_norm"),
        ({"max_norm": -float("inf")}, "max_norm"),
        ({"max_norm": 10**400}, "max_norm"),
        ({"max_norm": -1}, "max_norm"),
    ],
)
def test_wrong_arguments_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        build({"use": "clip", **table}, "[[chain]] #1", TRANSFORM, more_keys=("max_norm", "each"))
    assert str(caught.value).startswith("[[chain]] #1: ") and message in str(caught.value)


def test_a_whole_number_serves_as_a_number() -> None:
    built = build({"use": "clip", "max_norm": 2}, "here", TRANSFORM)
    assert built == clip(2.0)
    assert isinstance(built.max_norm, float)


def component(model: object, shape: Sequence[int], a: int, b: str = "x", classes: int = 2) -> None: ...


def test_offered_values_reach_only_components_that_request_them() -> None:
    offered = {"model": "M", "shape": (1, 2), "classes": 10}
    assert check_arguments(component, {"a": 1}, "here", offered) == {"a": 1, "model": "M", "shape": (1, 2)}
    with pytest.raises(SpecError):
        check_arguments(component, {"a": 1, "model": "mine"}, "here", offered)
    assert check_arguments(component, {"a": 1, "classes": 3}, "here", offered)["classes"] == 3, (
        "its own: it has a default"
    )


@pytest.mark.parametrize(
    ("value", "hint", "result"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (0.5, float, 0.5),
        ("a", str, "a"),
        (True, bool, True),
        (None, int | None, None),
        (3, int | None, 3),
        (3, float | None, 3.0),
        ([1, 2], Sequence[int], (1, 2)),
        ([1, 2], tuple[float, ...], (1.0, 2.0)),
        ([], list[int], ()),
        ([[1], [2, 3]], Sequence[Sequence[int]], ((1,), (2, 3))),
        ("iid", Literal["iid", "shards"], "iid"),
        (object, Any, object),
        ({"a": 1}, dict, {"a": 1}),
        ({"use": "x", "n": 1}, Mapping[str, Any], {"use": "x", "n": 1}),
        ({"a": 1}, Mapping[str, float], {"a": 1.0}),
        (2, Count | None, 2),
        (None, Count | None, None),
    ],
)
def test_values_that_fit(value: Any, hint: Any, result: Any) -> None:
    found = coerce(value, hint, "here")
    assert found == result
    assert type(found) is type(result)


@pytest.mark.parametrize(
    ("value", "hint", "wanted"),
    [
        (True, int, "an integer"),
        (1, bool, "true or false"),
        (1.0, int, "an integer"),
        (1, str, "a string"),
        (None, int, "an integer"),
        ("3", int | None, "an integer"),
        (True, float | None, "a number"),
        ("abc", Sequence[str], "a list, each a string"),
        ([1, True], Sequence[int], "an integer"),
        ("x", Literal["iid", "shards"], "one of 'iid', 'shards'"),
        (1, Literal[True], "one of True"),
        ([], dict, "a table"),
        ({"a": "b"}, Mapping[str, int], "an integer"),
        ("f", Callable[[int], int], ""),
        (0, Count, "at least 1"),
        (-0.1, NotNegative | None, "at least 0"),
        ([2, 0], Sequence[Count], "at least 1"),
        ((0.9, 1.0), tuple[Fraction, Fraction], "at least 0 and below 1"),
        ([0.9], tuple[Fraction, Fraction], "a list of 2, each a number"),
        ([1, 2, 3], tuple[int, int] | None, "a list of 2, each an integer"),
    ],
)
def test_values_that_do_not_fit(value: Any, hint: Any, wanted: str) -> None:
    with pytest.raises(SpecError, match=rf"^here.* must be {wanted}"):
        coerce(value, hint, "here")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
HINTS = [Count, int, float, str, bool, dict, int | None, Sequence[int], tuple[float, ...], Literal["a", "b"]]


@given(value=JSON, hint=st.sampled_from(HINTS))
def test_any_value_fits_or_is_refused(value: Any, hint: Any) -> None:
    try:
        found = coerce(value, hint, "here")
    except SpecError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert message.startswith("here")
        return
    plain = {Count: int, Sequence[int]: tuple, tuple[float, ...]: tuple, Literal["a", "b"]: str, int | None: int}.get(
        hint, hint
    )
    assert found is None or type(found) is plain
    assert found == (tuple(value) if isinstance(value, list) else value)


def test_a_value_that_the_component_refuses_names_the_table() -> None:
    def picky(a: int) -> int:
        raise ValueError(f"a must be even, got {a}")

    assert ComponentKind("a picky thing", (), int).admits_outside(picky, ("tests",))
    with pytest.raises(SpecError, match=r"^\[x\]: "):
        call(picky, {"a": 3}, "[x]")
    with pytest.raises(TypeError):  # a broken program is not the author's mistake
        call(picky, {"b": 3}, "[x]")
