"""Component tables: what may be named, what is checked, and what the author of a wrong table is told."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgauge.attacks.plan import ATTACK
from fedgauge.client.components import ComponentKind, SpecError, build, check_arguments, coerce, resolve
from fedgauge.client.federation import DATASET, TRANSFORM
from fedgauge.client.models.build import MODEL
from fedgauge.client.models.losses import LOSS
from fedgauge.defenses.clip import clip

KINDS = {"dataset": DATASET, "model": MODEL, "loss": LOSS, "transform": TRANSFORM, "attack": ATTACK}


def test_every_component_is_found() -> None:
    images = [
        f"fedgauge.client.models.vision:{n}"
        for n in ("convbig", "convnet", "convsmall", "lenet", "mlp", "resnet", "resnet20")
    ]
    assert MODEL.names() == images + [
        f"fedgauge.client.models.language:{n}" for n in ("decoder", "encoder", "tiny_bert", "tiny_gpt2", "transformer3")
    ]
    public = [f"fedgauge.client.data.images:{n}" for n in ("cifar10", "cifar100", "fashion_mnist", "mnist", "mnist5k")]
    text = [
        f"fedgauge.client.data.corpora:{n}" for n in ("cola", "csv", "phrases", "rotten_tomatoes", "sst2", "wikitext2")
    ]
    own = [f"fedgauge.client.data.own_images:{n}" for n in ("hugging_face", "image_folder", "npz")]
    assert DATASET.names() == text + public + own
    assert LOSS.names() == [
        f"fedgauge.client.models.losses:{n}" for n in ("cross_entropy", "mean_squared_error", "next_token")
    ]
    assert {"local_sgd", "clip", "gaussian"} <= set(TRANSFORM.names())
    assert {"analytic", "inverting_gradients"} <= set(ATTACK.names())


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_is_offered_can_be_resolved(kind: ComponentKind) -> None:
    for name in kind.names():
        assert resolve({"use": name}, "here", kind).__name__ == name.split(":")[1]


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        # the wrong form
        ("model", None, 'needs use = "module:name", got None'),
        ("model", 3, 'needs use = "module:name", got 3'),
        ("model", "lenet", "needs use = \"module:name\", got 'lenet'"),
        ("model", "a:b", 'needs use = "module:name"'),
        # outside the packages of its kind
        ("model", "os:system", "'os:system' is not allowed here"),
        ("model", "torchvision.models:resnet18", "is not allowed here"),
        ("model", "client.modelsx:lenet", "is not allowed here"),
        ("model", "mnist5k", "is not allowed here"),
        ("transform", "lenet", "is not allowed here"),
        ("transform", "..clip", "is not allowed here"),
        # nothing there
        ("model", "vgg", "nothing is called 'vgg'"),
        ("transform", "defenses.clips:clip", "nothing is called 'defenses.clips:clip'"),
        ("transform", "clip.nothing", "nothing is called"),
        ("transform", "defenses. clip:clip", "nothing is called"),
        # something else
        ("dataset", "os", "'os' is not a dataset"),
        ("dataset", "os.system", "is not a dataset"),
        ("dataset", "fedgauge.client.data.images:Dataset", "is not a dataset"),
        ("dataset", "data_folder", "is not a dataset"),
        ("model", "last_linear", "is not a model"),
        ("model", "nn.Module", "is not a model"),
        ("model", "fedgauge.client.models.vision:Shape", "is not a model"),
        ("model", "fedgauge.client.models.vision:", "is not a model"),
        ("transform", "fedgauge.client.update:Link", "is not a link of a chain"),
        ("transform", "fedgauge.client.update:UpdateTransform", "is not a link of a chain"),
        ("transform", "per_example", "is not a link of a chain"),
        ("transform", "chain", "is not a link of a chain"),
        ("transform", "clip.apply", "is not a link of a chain"),
        ("transform", "fedgauge.defenses.mask:UpdateTransform", "is not a link of a chain"),
        ("attack", "fedgauge.attacks.base:Attack", "is not an attack"),
        ("attack", "psnr", "is not an attack"),
        (
            "attack",
            "fedgauge.attacks.matching.gradient_matching:GradientMatching",
            "is not an attack",
        ),  # the engine; its recipes are
        # private parts of a module
        ("transform", "_Noise", "is not a link of a chain"),
        ("transform", "_expected_mask", "is not a link of a chain"),
        ("transform", "_soft_sign", "is not a link of a chain"),
        ("model", "_Block", "is not a model"),
        ("model", "_norm", "is not a model"),
        ("model", "_ResNet.forward", "is not a model"),
    ],
)
def test_a_wrong_name_is_refused_with_the_allowed_ones(kind: str, name: Any, message: str) -> None:
    with pytest.raises(SpecError) as told:
        build({"use": name}, "[[table]] #3", KINDS[kind])
    assert str(told.value).startswith("[[table]] #3: ")
    assert message in str(told.value)
    for allowed in KINDS[kind].names():
        assert allowed in str(told.value)


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
def test_wrong_arguments_are_told(table: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as told:
        build({"use": "clip", **table}, "[[chain]] #1", TRANSFORM)
    assert str(told.value).startswith("[[chain]] #1: ")
    assert message in str(told.value)


def test_a_table_that_is_shared_names_all_its_keys() -> None:
    with pytest.raises(SpecError) as told:
        build({"use": "clip", "max_nrom": 1.0}, "here", TRANSFORM, beside=("max_norm", "each"))
    assert str(told.value) == "here: clip() has no argument 'max_nrom' (it has: max_norm, each)"


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
    with pytest.raises(SpecError) as told:
        coerce(value, hint, "here")
    assert str(told.value).startswith("here")
    assert message in str(told.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
HINTS = [int, float, str, bool, dict, int | None, Sequence[int], tuple[float, ...], Literal["a", "b"]]


@given(value=JSON, hint=st.sampled_from(HINTS))
def test_any_value_fits_or_is_told(value: Any, hint: Any) -> None:
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

    kind = ComponentKind("a picky thing", (picky.__module__,), int)
    assert kind.admits(picky, picky.__module__)
    from fedgauge.client.components import call

    with pytest.raises(SpecError, match=r"\[x\]: a must be even, got 3"):
        call(picky, {"a": 3}, "[x]")
    with pytest.raises(TypeError):  # a broken program is not the author's mistake
        call(picky, {"b": 3}, "[x]")
