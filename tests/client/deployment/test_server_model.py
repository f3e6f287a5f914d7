"""The network that a server names: whatever it says, a client opens no path and tells nothing of itself."""

import builtins
import io
import json
import os
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedgauge.client.app import app
from fedgauge.client.components import resolve
from fedgauge.client.deployment.deployed_client import DeployedClient
from fedgauge.client.deployment.owner_file import OwnerConfig
from fedgauge.client.deployment.server_model import NOT_BUILT, TOO_LARGE, build_servers_model
from fedgauge.client.deployment.server_terms import NO_FILE, RequestRefused
from fedgauge.client.models.build import ADAPTER, MALICIOUS, MODEL, MODEL_DEFENSE
from fedgauge.client.models.tokenizer import wordpiece
from tests.client.deployment.conftest import SERVERS, SGD, Write, terms

SENTENCES = ("the cat sat on the mat", "a dog barks", "rain falls on the quiet town", "we sing")
IMAGES = {"shape": (1, 28, 28), "classes": 10}
KINDS = ((MODEL, None), (ADAPTER, "adapter"), (MODEL_DEFENSE, "defense"), (MALICIOUS, "architectures"))
OFFERED = {"return", "shape", "classes", "tokenizer", "task", "model"}
SENTENCES_OF_REFUSALS = {NO_FILE, NOT_BUILT, TOO_LARGE}


@pytest.fixture(scope="module")
def words() -> dict[str, Any]:
    tokenizer = wordpiece(SENTENCES, 100)
    return {"shape": (8,), "classes": 2, "tokenizer": tokenizer, "task": "classification"}


def arguments() -> Iterator[tuple[str, str | None, str, Any]]:
    """Every argument of every component that a server can name: the component, its key in [model], argument, type hint."""
    for kind, key in KINDS:
        for entry in kind.entries():
            hints = typing.get_type_hints(resolve({"use": entry.name}, "", kind))
            yield from ((entry.name, key, name, hint) for name, hint in hints.items() if name not in OFFERED)


def named(use: str, key: str | None, **arguments: Any) -> dict[str, Any]:
    table = {"use": use, **arguments}
    return table if key is None else {"use": "lenet", key: [table]}


def outcome(table: dict[str, Any], offered: dict[str, Any], most: int = 2**20) -> str:
    """The refusal; empty if it is built."""
    try:
        build_servers_model(table, offered, 0, most)
    except RequestRefused as reason:
        return str(reason)
    return ""


# ---------------------------------------------------------------------------------------------------------------- paths


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A folder in the current one that is a model and a package, and what is opened or looked at beneath it."""
    folder = tmp_path / "canary"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "secret-word", "auto_map": {"AutoConfig": "x.Y"}}))
    (folder / "__init__.py").write_text("raise SystemExit('imported')")
    seen: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)

    def watch(holder: Any, name: str) -> None:
        real = getattr(holder, name)

        def watched(path: Any = ".", *args: Any, **more: Any) -> Any:
            if isinstance(path, str | bytes | os.PathLike):
                absolute = os.path.abspath(os.fsdecode(path))
                if absolute == str(folder) or absolute.startswith(f"{folder}/"):
                    seen.append(absolute)
            return real(path, *args, **more)

        monkeypatch.setattr(holder, name, watched)

    for name in ("stat", "lstat", "listdir", "scandir", "open", "readlink", "access"):
        watch(os, name)
    for holder in (builtins, io):
        watch(holder, "open")
    return folder, seen


def forms(folder: Path) -> list[str]:
    """Ways to write a path to a folder in the current one."""
    inner = ["canary", "./canary", "canary/", "canary/config.json", f"../{folder.parent.name}/canary", "x/../canary"]
    return [*inner, str(folder), "~/canary", f"file://{folder}", ".\\canary", "C:\\canary", "C:canary", f"//{folder}",
            "\\\\?\\canary", "canary\0", " canary", "", "..", "$HOME/canary", "canary\uff0fconfig.json"]  # fmt: skip


def test_no_path_in_any_argument_of_any_component_is_looked_at(
    canary: tuple[Path, list[str]], words: dict[str, Any]
) -> None:
    """Nor does an answer depend on what is there: it is the same after the folder is gone."""
    folder, seen = canary
    os.stat(folder / "config.json")
    assert seen, "the watch works"
    seen.clear()
    tables = [named(use, key, **{name: value}) for use, key, name, _ in arguments() for form in forms(folder)
              for value in (form, [form], {"use": form}, [{"path": {form: [form]}}])]  # fmt: skip
    tables += [named(form, key) for form in forms(folder) for _, key in KINDS]
    tables += [{"use": f"{form}:net"} for form in forms(folder)]
    tables += [{"use": "mlp", "mode": form} for form in forms(folder)]
    answers = [outcome(table, IMAGES if "use" not in table or i % 2 else words) for i, table in enumerate(tables)]
    assert not seen, seen[:3]
    assert "canary" not in sys.modules and len(tables) > 400
    assert set(answers) <= SENTENCES_OF_REFUSALS | {""}
    assert not any(str(folder.parent) in answer or "secret" in answer for answer in answers)
    folder.rename(folder.parent / "elsewhere")
    again = [outcome(table, IMAGES if "use" not in table or i % 2 else words) for i, table in enumerate(tables)]
    assert again == answers


NETS = """
from os import PathLike
from typing import Any
from torch import nn
def net(shape, classes: int, source: str = "", more: Any = None, file: "PathLike[str] | None" = None) -> nn.Module:
    if source or more or file:
        raise AssertionError(f"read {source or more or file}")
    return nn.Sequential(nn.Flatten(), nn.Linear(784, classes))
"""


@pytest.mark.parametrize(
    "given", [{"source": "a/b"}, {"more": [{"deep": ["~/x"]}]}, {"more": {"/etc": 1}}, {"file": "x"}]
)
def test_a_package_that_the_owner_allows_gets_no_path_either(write: Write, tmp_path: Path, given: Any) -> None:
    (tmp_path / "ownerstexts.py").write_text(NETS)
    own = OwnerConfig.load(write(allow=["ownerstexts"]))
    DeployedClient.of(own, terms(model={"use": "ownerstexts:net"}))
    with pytest.raises(RequestRefused) as refused:
        DeployedClient.of(own, terms(model={"use": "ownerstexts:net", **given}))
    assert str(refused.value) == NO_FILE


# ---------------------------------------------------------------------------------------------------- pre-trained models


def hub_cache(root: Path, net: Any, name: str = "tiny/model") -> Path:
    """A model in the form of the hub's cache; its snapshot's folder."""
    from transformers import PreTrainedTokenizerFast

    home = root / f"models--{name.replace('/', '--')}"
    folder = home / "snapshots" / ("5" * 40)
    folder.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("5" * 40)
    net.save_pretrained(folder)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=wordpiece(SENTENCES, 100).backend, **special).save_pretrained(folder)
    return folder


def pretrained(use: str, size: int) -> Any:
    import transformers

    if use == "encoder":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=size, **sizes))
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2, n_positions=32, eos_token_id=3)
    )


@pytest.mark.usefixtures("identity")
@pytest.mark.parametrize("use", ["encoder", "decoder"])
def test_a_pretrained_model_of_the_clients_cache_trains_in_a_deployment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: dict[str, Any], use: str
) -> None:
    pytest.importorskip("transformers", reason="the extra [text] is not installed")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    saved = pretrained(use, words["tokenizer"].size)
    snapshot = hub_cache(tmp_path / "hub", saved)
    task = "classification" if use == "encoder" else "next_token"
    table = tmp_path / "notes.csv"
    table.write_text("text,label\n" + "".join(f"{s},{i % 2}\n" for i, s in enumerate(SENTENCES * 4)))
    owner = {
        "client": 1,
        "data": {"use": "csv", "path": str(table), "task": task, "length": 8, "tokenizer_folder": str(snapshot),
                 "batch_size": 2, "whole": True},
        "chain": [SGD],
        "loss": {"use": "cross_entropy" if use == "encoder" else "next_token"},
    }  # fmt: skip
    path = tmp_path / "client.toml"
    path.write_text(tomli_w.dumps(owner))
    model = {"use": use, "name": "tiny/model"}
    own = DeployedClient.of(OwnerConfig.load(path), terms(model=model))
    params, _ = own.initial()
    mine = {k.removeprefix("net."): t for k, t in params.items()}
    same = [k for k, t in saved.named_parameters() if k in mine and torch.equal(mine[k], t)]
    assert len(same) >= len(mine) - 2, "all but a new head's weight and bias are the cache's"
    content = RecordDict({"arrays": ArrayRecord(params), "config": ConfigRecord({"server-round": 1})})
    config = {"protocol": json.dumps(SERVERS | {"model": model})}
    message = Message(content, dst_node_id=7, message_type="train")
    reply = app(message, Context(1, 7, {"client": str(path)}, RecordDict(), config))
    update = reply.content.array_records["update"].to_torch_state_dict()
    assert update.keys() == params.keys() and any(bool(t.any()) for t in update.values())


# ----------------------------------------------------------------------------------------------------------------- sizes


def test_the_owner_says_how_large_a_network_may_be(write: Write) -> None:
    assert OwnerConfig.load(write()).max_parameters == 2**28
    with pytest.raises(RequestRefused):
        DeployedClient.of(OwnerConfig.load(write(max_parameters=6_000)), terms())
    assert DeployedClient.of(OwnerConfig.load(write(max_parameters=6_370)), terms()).model is not None
