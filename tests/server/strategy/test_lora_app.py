"""A LoRA app as FlowerTune's authors write theirs, with two lines of fedgauge's: its clients' sentences come back."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fedgauge.client.data.corpora import phrases
from fedgauge.client.data.grammar import sentences
from fedgauge.server.store.run import Run
from fedgauge.simulations.cli.main import main

pytest.importorskip("transformers", reason="the extra [text] is not installed")
pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="the extra [adapters] is not installed"),
    pytest.mark.filterwarnings("ignore"),  # the app's packages warn of each other
]
APPS = Path(__file__).resolve().parents[2] / "foreign"
CLIENTS, LENGTH = 2, 16
TEXTS = [text for text, _ in sentences()[: 4 * CLIENTS]]
GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "text.md").read_text()
SCENARIO = re.findall(r"```toml\n(.*?)```", GUIDE.partition("## A Flower app that sends adapters")[2], re.DOTALL)[0]


def audit_file(folder: Path, text: str = SCENARIO) -> None:
    (folder / "audit.toml").write_text(text.replace("tiny-llama", str(folder / "tiny-llama")))


def write_model(folder: Path) -> None:
    """A tiny Llama with its tokenizer: a user's base model."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = phrases(LENGTH).tokenizer
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words.backend, **special).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=words.size, hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=None, eos_token_id=3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    """The app's settings, at the size of its model."""
    base = {
        "num-server-rounds": 3,
        "model.name": str(folder / "tiny-llama"),
        "model.lora.peft-lora-r": 32,
        "model.lora.peft-lora-alpha": 64,
        "model.lora.peft-lora-dropout": 0.0,
        "dataset.path": str(folder / "sentences.txt"),
        "dataset.examples": 1,
        "train.seq-length": LENGTH,
        "train.learning-rate-max": 0.1,
        "train.learning-rate-min": 0.1,
        "train.optim": "sgd",
        "train.max-steps": 1,
        "train.batch-size": 1,
        "strategy.fraction-train": 1.0,
        "save-path": str(folder / "results"),
        "audit": str(folder / "audit.toml"),
        "record-to": str(folder / "theirs"),
    }
    return base | changes


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the app's base model and data."""
    write_model(tmp_path / "tiny-llama")
    (tmp_path / "sentences.txt").write_text("\n".join(TEXTS))
    return tmp_path


def test_at_most_ten_lines_are_fedgauges() -> None:
    """Those in the app, and those of the guide's scenario beside it."""
    sources = [p.read_text() for p in (APPS / "flowertune").glob("*.py")]
    added = [line for text in sources for line in text.splitlines() if "fedgauge" in line]
    assert len(added) == 2 and len(added) + len(SCENARIO.splitlines()) <= 10


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds children by /proc: Linux")
def test_sentences_are_recovered_from_adapters_trained_by_flower(
    kit: Any, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit_file(place)
    kit.run_under_flower(place, "flowertune", settings(place))
    assert (place / "results" / "peft_3" / "adapter_model.safetensors").exists(), "the app's own last model"
    run = Run.open(place / "theirs")
    with run.ledger() as ledger:
        assert [(o["round"], o["client"], o["status"]) for o in ledger.observations()] == [
            (r, c, "accepted") for r in (1, 2, 3) for c in range(CLIENTS)
        ]
    assert main(["audit", str(run.folder)]) == 0
    words = phrases(LENGTH).tokenizer
    for round in (1, 2, 3):
        found = [run.read_reconstruction(round, client, "dager")["x"][0].tolist() for client in range(CLIENTS)]
        assert sorted(map(words.decode, found)) == sorted(words.decode(words.encode(t)) for t in TEXTS[:CLIENTS])
