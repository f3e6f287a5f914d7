"""`import client` makes torchvision, and what imports it, usable beside a CPU build of torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

LPIPS = """
import client, warnings
warnings.simplefilter("ignore")
import lpips, torch  # which imports torchvision
assert lpips.LPIPS(net="alex", pnet_rand=True, verbose=False)(*torch.rand(2, 1, 3, 64, 64)).shape == (1, 1, 1, 1)
import torchvision
from torchvision.transforms import v2
assert v2.Resize(4)(torch.rand(3, 8, 8)).shape == (3, 4, 4)
assert torchvision.models.resnet18().eval()(torch.rand(1, 3, 32, 32)).shape == (1, 1000)
from fedgauge.client.models.torchvision_mend import mend_torchvision
mend_torchvision()  # a second call changes nothing
"""
TRANSFORMERS = """
import client
from transformers import BertConfig, BertModel
import torch
model = BertModel(BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
assert model(torch.tensor([[1, 2, 3]])).last_hidden_state.shape == (1, 3, 8)
"""


@pytest.mark.full
@pytest.mark.slow  # each starts a fresh Python, for what is imported first decides
@pytest.mark.parametrize("program", [LPIPS, TRANSFORMERS], ids=["torchvision", "transformers"])
def test_a_fresh_process_can_use(program: str) -> None:
    if program is TRANSFORMERS:
        pytest.importorskip("transformers")
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
