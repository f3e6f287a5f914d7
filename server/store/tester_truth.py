"""Truth from a tester: the training examples of a foreign app's clients, by client and round."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fedgauge.attacks.modality.registry import modality_of
from fedgauge.client.components import SpecError
from fedgauge.client.data.dataset import Dataset
from fedgauge.client.data_folder import read_npz
from fedgauge.client.update import Batch

_NAME = re.compile(r"(client|node)-(-?\d+)(-round-\d+)?\.npz")
LAYOUT = "client-0-round-1.npz (or client-0.npz for all rounds, node-ID by Flower's node id), each with x and y"


@dataclass(frozen=True)
class TesterTruth:
    """Folder with a file of examples for each client and round."""

    folder: Path

    @classmethod
    def named(cls, text: str) -> "TesterTruth":
        """Make from a path on the command line, or in the run's ledger.

        Raises:
            SpecError: the folder has no file of the truth.
        """
        folder = Path(text).absolute()
        if not any(_NAME.fullmatch(path.name) for path in folder.glob("*.npz")):
            raise SpecError(f"--truth: {folder} is no folder of {LAYOUT}")
        return cls(folder)

    def batch(self, round: int, client: int, like: Dataset, nodes: Mapping[int, str]) -> Batch | None:
        """Return the examples of a client in a round, pixels in [0, 1]; None without a file.

        Args:
            like: the audit's dataset, for the shape of the examples.
            nodes: Flower's node ids by client.

        Raises:
            SpecError: a file is damaged, or has other examples.
        """
        own = [f"client-{client}", *([f"node-{nodes[client]}"] if client in nodes else [])]
        names = (f"{name}{of}.npz" for of in (f"-round-{round}", "") for name in own)
        path = next((self.folder / name for name in names if (self.folder / name).is_file()), None)
        if path is None:
            return None
        try:
            arrays = {key: torch.from_numpy(array) for key, array in read_npz(path).items()}
            x, y = modality_of(like).arranged(arrays["x"]), arrays["y"]
        except (ValueError, TypeError, KeyError) as error:
            raise SpecError(f"{path} cannot be read as the truth, examples x and labels y: {error}") from error
        if x.shape[:1] != y.shape[:1] or tuple(x.shape[1:]) != like.shape:
            found = f"examples x of shape {tuple(x.shape)} and labels y of shape {tuple(y.shape)}"
            raise SpecError(f"{path} has {found}; the audit's examples have {like.shape}, each with a label")
        return Batch(x.contiguous(), y.float() if y.is_floating_point() else y.long())
