"""Component tables: what may be named, what is checked, and what an error says to the author of a wrong table."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgauge.attacks.plan import ATTACK
from fedgauge.client.components import ComponentKind, SpecError, build, call, check_arguments, coerce, resolve
from fedgauge.client.federation import DATASET, TRANSFORM
from fedgauge.client.models.build import MODEL
from fedgauge.client.models.losses import LOSS
from fedgauge.defenses.clip import clip

KINDS = {"dataset": DATASET, "model": MODEL, "loss": LOSS, "transform": TRANSFORM, "attack": ATTACK}


def test_components_have_short_names() -> None:
    vision = ["convbig", "convnet", "convsmall", "lenet", "mlp", "resnet", "resnet20"]
    text = ["decoder", "encoder", "tiny_bert", "tiny_gpt2", "transformer3"]
    others = ["embedding_mlp", "ft_transformer", "timm", "torchvision"]
    assert MODEL.names() == sorted([*vision, *text, *others])
    images = ["cifar10", "cifar100", "fashion_mnist", "mnist", "mnist5k"]
    text = ["cola", "csv", "phrases", "rotten_tomatoes", "sst2", "wikitext2"]
    rows = ["adult", "census", "german_credit", "table"]
    assert DATASET.names() == sorted([*images, *text, *rows, "hugging_face", "image_folder", "npz"])
    assert LOSS.names() == ["cross_entropy", "mean_squared_error", "next_token"]
    assert {"local_sgd", "clip", "gaussian"} <= set(TRANSFORM.names())
    assert {"analytic", "inverting_gradients"} <= set(ATTACK.names())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_is_offered_can_be_resolved(kind: ComponentKind) -> None:
    for name in kind.names():
        assert resolve({"use": name}, "here", kind).__name__ == name


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("model", None, 'needs use = "name", got None'),
        ("model", 3, 'needs use = "name", got 3'),
        ("model", "", "needs use = \"name\", got ''"),
        # of another kind, or nowhere
        ("model", "mnist5k", "nothing is called 'mnist5k'"),
        ("transform", "lenet", "nothing is called 'lenet'"),
        ("model", "vgg", "nothing is called 'vgg'"),
        ("dataset", "os", "nothing is called 'os'"),
        ("dataset", "os.system", "nothing is called 'os.system'"),
        ("transform", "..clip", "nothing is called '..clip'"),
        ("transform", "clip.apply", "nothing is called 'clip.apply'"),
        ("transform", " clip", "nothing is called ' clip'"),
        # written in a module of components, but none
        ("dataset", "data_folder", "nothing is called"),
        ("model", "last_linear", "nothing is called"),
        ("model", "nn.Module", "nothing is called"),
        ("transform", "Link", "nothing is called"),
        ("transform", "per_example", "nothing is called"),
        ("transform", "chain", "nothing is called"),
        ("attack", "Attack", "nothing is called"),
        ("attack", "psnr", "nothing is called"),
        ("attack", "GradientMatching", "nothing is called"),  # the engine; its recipes are components
        ("transform", "_Noise", "nothing is called"),
        ("transform", "_expected_mask", "nothing is called"),
        ("model", "_Block", "nothing is called"),
        ("model", "_ResNet.forward", "nothing is called"),
        # module:name is for packages that are allowed
        ("model", "os:system", "'os:system' is not allowed here"),
        ("model", "torchvision.models:resnet18", "is not allowed here"),
        ("model", "a:b:c", "use is a short name"),
        ("dataset", "fedgauge.client.data.images:Dataset", "is not allowed here"),
        ("model", "fedgauge.client.models.vision:", "is not allowed here"),
        ("transform", "fedgauge.client.transforms:Link", "is not allowed here"),
        ("transform", "fedgauge.defenses.mask:UpdateTransform", "is not allowed here"),
        ("attack", "fedgauge.attacks.matching.gradient_matching:GradientMatching", "is not allowed here"),
    ],
)
def test_a_wrong_name_is_refused(kind: str, name: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        build({"use": name}, "[[table]] #3", KINDS[kind])
    assert str(caught.value).startswith("[[table]] #3: ")
    assert message in str(caught.value)
    if name != "a:b:c":  # the form is wrong, whatever is allowed
        for allowed in KINDS[kind].names():
            assert allowed in str(caught.value) or "did you mean" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "misspelt", "meant"),
    [
        ("model", "lennet", "lenet"),
        ("attack", "inverting_gradient", "inverting_gradients"),
        ("transform", "gausian", "gaussian"),
        ("attack", "attacks.matching:inverting_gradient", "inverting_gradients"),
    ],
)
def test_a_misspelt_name_gets_the_nearest(kind: str, misspelt: str, meant: str) -> None:
    with pytest.raises(SpecError, match=f"did you mean '{meant}'"):
        resolve({"use": misspelt}, "here", KINDS[kind])


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(SpecError) as caught:
        resolve({"use": "transmogrify"}, "here", TRANSFORM)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"max_nrom": 1.0}, "clip() has no argument 'max_nrom' (it has: max_norm)"),
        ({"max_norm": 1.0, "seed": 3}, "clip() has no argument 'seed' (it has: max_norm)"),
        ({}, "clip() needs the argument 'max_norm'"),
        ({"max_norm": "1"}, "max_norm must be a number, got '1'"),
        ({"max_norm": True}, "max_norm must be a number, got True"),
        ({"max_norm": [1.0]}, "max_norm must be a number, got [1.0]"),
        ({"max_norm": float("nan")}, "max_norm must be a finite number, got nan"),
        ({"max_norm": float("inf")}, "max_norm must be a finite number, got inf"),
        ({"max_norm": -float("inf")}, "max_norm must be a finite number, got -inf"),
        ({"max_norm": 10**400}, "max_norm must be a finite number, got 1000"),
        ({"max_norm": -1}, "max_norm must be above 0, got -1.0"),
    ],
)
def test_wrong_arguments_are_refused(table: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        build({"use": "clip", **table}, "[[chain]] #1", TRANSFORM)
    assert str(caught.value).startswith("[[chain]] #1: ")
    assert message in str(caught.value)


def test_a_table_that_is_shared_names_all_its_keys() -> None:
    with pytest.raises(SpecError) as caught:
        build({"use": "clip", "max_nrom": 1.0}, "here", TRANSFORM, beside=("max_norm", "each"))
    assert str(caught.value) == "here: clip() has no argument 'max_nrom' (it has: max_norm, each)"


def test_a_whole_number_serves_as_a_number() -> None:
    built = build({"use": "clip", "max_norm": 2}, "here", TRANSFORM)
    assert built == clip(2.0)
    assert isinstance(built.max_norm, float)


def component(model: object, shape: Sequence[int], a: int, b: str = "x", classes: int = 2) -> None: ...


def test_what_is_offered_is_given_to_those_who_ask_and_to_nobody_else() -> None:
    offered = {"model": "M", "shape": (1, 2), "classes": 10}
    assert check_arguments(component, {"a": 1}, "here", offered) == {"a": 1, "model": "M", "shape": (1, 2)}
    with pytest.raises(SpecError, match=r"component\(\) has no argument 'model' \(it has: a, b, classes\)"):
        check_arguments(component, {"a": 1, "model": "mine"}, "here", offered)
    assert check_arguments(component, {"a": 1, "classes": 3}, "here", offered)["classes"] == 3, (
        "its own: it has a default"
    )


def test_a_callable_that_takes_anything_is_checked_by_its_named_arguments() -> None:
    def loose(a: int = 0, **others: Any) -> None: ...

    with pytest.raises(SpecError, match=r"loose\(\) has no argument 'b' \(it has: a\)"):
        check_arguments(loose, {"b": 1}, "here")


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
    ],
)
def test_values_that_fit(value: Any, hint: Any, result: Any) -> None:
    found = coerce(value, hint, "here")
    assert found == result
    assert type(found) is type(result)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (True, int, "must be a whole number, got True"),
        (1, bool, "must be true or false, got 1"),
        (1.0, int, "must be a whole number, got 1.0"),
        (1, str, "must be a text, got 1"),
        (None, int, "must be a whole number, got None"),
        ("3", int | None, "must be a whole number, got '3'"),
        (True, float | None, "must be a number, got True"),
        ("abc", Sequence[str], "must be a list, each a text, got 'abc'"),
        ([1, True], Sequence[int], "[1] must be a whole number, got True"),
        ("x", Literal["iid", "shards"], "must be one of 'iid', 'shards', got 'x'"),
        (1, Literal[True], "must be one of True, got 1"),
        ([], Literal["iid"], "must be one of 'iid', got []"),
        ([], dict, "must be a table, got []"),
        ("x", Mapping[str, Any], "must be a table, got 'x'"),
        ({"a": "b"}, Mapping[str, int], ": a must be a whole number, got 'b'"),
        ("f", Callable[[int], int], "got 'f'"),
    ],
)
def test_values_that_do_not_fit(value: Any, hint: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        coerce(value, hint, "here")
    assert str(caught.value).startswith("here")
    assert message in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
HINTS = [int, float, str, bool, dict, int | None, Sequence[int], tuple[float, ...], Literal["a", "b"]]


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
    plain = {Sequence[int]: tuple, tuple[float, ...]: tuple, Literal["a", "b"]: str, int | None: int}.get(hint, hint)
    assert found is None or type(found) is plain
    assert found == (tuple(value) if isinstance(value, list) else value)


def test_a_value_that_the_component_refuses_names_the_table() -> None:
    def picky(a: int) -> int:
        raise ValueError(f"a must be even, got {a}")

    assert ComponentKind("a picky thing", (), int).admits(picky)
    with pytest.raises(SpecError, match=r"\[x\]: a must be even, got 3"):
        call(picky, {"a": 3}, "[x]")
    with pytest.raises(TypeError):  # a broken program is not the author's mistake
        call(picky, {"b": 3}, "[x]")
