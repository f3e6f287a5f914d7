"""A guard that inspects: the owner is told, the server gets the usual answer, and what is remembered lies with the client."""

import warnings

with warnings.catch_warnings():  # typer asks click for names that Click 9 will drop
    warnings.filterwarnings("ignore", "'click.utils.get_.*_stream' is deprecated", DeprecationWarning)
    import flwr.clientapp  # noqa: F401

from pathlib import Path

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor
from torch.nn import functional as F

from fedgauge.client.components import SpecError
from fedgauge.client.deployment.guard import INSPECTED, REASON, WITHHELD, guard, inspect_message
from fedgauge.client.deployment.owner import GuardPolicy, OwnerConfig
from fedgauge.client.deployment.state_folder import ClientFolder, DamagedState
from fedgauge.client.inspection.policy import FIRST_NETWORK, InspectionPolicy, Mode, fingerprint
from fedgauge.client.inspection.probes import ProbeSet
from fedgauge.client.models.vision import convnet, detached_params
from fedgauge.client.transforms import TransformState
from fedgauge.client.update import Batch, Params
from tests.conftest import MakeFederation

pytestmark = pytest.mark.usefixtures("identity")


class Node:
    """Anybody's ClientApp behind a guard, on a node whose state lasts."""

    def __init__(self, inspection_policy: InspectionPolicy, probes: ProbeSet | None = None) -> None:
        self.told: list[str] = []
        self.trained = 0
        self.context = Context(1, 2, {}, RecordDict(), {})
        self.app = ClientApp()

        @self.app.train(mods=[guard(inspection_policy=inspection_policy, probes=probes, note=self.told.append)])
        def train(message: Message, context: Context) -> Message:
            self.trained += 1
            return Message(RecordDict({"arrays": message.content.array_records["arrays"]}), reply_to=message)

    def refuses(self, weights: dict[str, Tensor]) -> bool:
        content = RecordDict({"arrays": ArrayRecord(weights), "config": ConfigRecord({"server-round": 1})})
        reply = self.app(Message(content, dst_node_id=2, message_type="train"), self.context)
        if reply.has_error():
            assert (reply.error.code, reply.error.reason) == (WITHHELD, REASON)
        return bool(reply.has_error())


def network() -> convnet:
    torch.manual_seed(0)
    return convnet((3, 9, 9), 5, width=8)


def swapped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: t.flip(0) if k.startswith("linear") else t for k, t in state.items()}


@pytest.mark.parametrize(
    ("mode", "held", "lines"), [("off", False, 0), ("log", False, 2), ("warn", False, 1), ("refuse", True, 1)]
)
def test_the_owner_chooses_what_an_alarm_does(mode: Mode, held: bool, lines: int) -> None:
    node, state = Node(InspectionPolicy(mode)), network().state_dict()
    assert not node.refuses(state)
    assert node.refuses(swapped(state)) == held
    assert node.trained == 2 - held, "what is refused is not trained on"
    assert len(node.told) == lines
    if lines:
        assert "linear.weight: 4 rows are nearer" in node.told[-1]
    assert (INSPECTED in node.context.state) == (mode != "off")


def test_the_state_of_a_mod_is_one_model_however_long_the_run() -> None:
    node, state = Node(InspectionPolicy("refuse")), network().state_dict()
    for _ in range(3):
        assert not node.refuses(state)
    kept = node.context.state.array_records[INSPECTED].to_torch_state_dict()
    parameters = {f"params.{name}" for name, _ in network().named_parameters()}
    assert kept.keys() == parameters | {"round", "messages"}
    assert int(kept["messages"]) == int(kept["round"]) == 3


def test_batch_statistics_may_jump() -> None:
    node, state = Node(InspectionPolicy("refuse")), network().state_dict()
    moved = {k: t + 50 if k.endswith(("running_mean", "running_var")) else t for k, t in state.items()}
    assert not node.refuses(state)
    assert not node.refuses(moved)


def test_with_its_network_and_examples_a_mod_sees_what_weights_alone_do_not_show() -> None:
    model = network()
    rng = torch.Generator().manual_seed(0)
    probe = Batch(torch.rand(12, 3, 9, 9, generator=rng), torch.arange(12) % 5)
    altered = {k: t - 1e4 if k == "norm7.bias" else t for k, t in model.state_dict().items()}
    assert not Node(InspectionPolicy("refuse")).refuses(altered)
    node = Node(InspectionPolicy("refuse"), ProbeSet(model, probe, F.cross_entropy))
    assert node.refuses(altered)
    assert "gets no gradient" in node.told[0] or "gradient is smaller by" in node.told[0]


def test_a_mod_tries_the_buffers_that_were_sent() -> None:
    """By a mean far above what comes in, BatchNorm feeds ReLU nothing but negative numbers: the network learns of nothing."""
    model = network()
    rng = torch.Generator().manual_seed(0)
    probe = Batch(torch.rand(12, 3, 9, 9, generator=rng), torch.arange(12) % 5)
    state = {k: t.clone() for k, t in model.state_dict().items()}
    altered = {k: t + 1e4 if k == "norm7.running_mean" else t for k, t in state.items()}
    node = Node(InspectionPolicy("refuse"), ProbeSet(model, probe, F.cross_entropy))
    assert not node.refuses(state)
    assert node.refuses(altered)
    assert "gets no gradient" in node.told[0] or "gradient is smaller by" in node.told[0]
    assert not node.refuses(state), "and those of the next message in their turn"
    assert node.trained == 2


# -------------------------------------------------------------------------------------------------- in this project's app


def test_a_client_of_a_simulation_asks_in_one_call(make_federation: MakeFederation) -> None:
    fed = make_federation(model={"use": "convnet", "width": 4})
    params, buffers = fed.initial()
    told: list[str] = []
    memory: TransformState = {}

    def ask(inspection_policy: InspectionPolicy, round: int, weights: Params) -> str:
        rows = fed.shards.rows_at(0, round)
        inspection = inspect_message(inspection_policy, fed, 0, round, rows, (weights, buffers), memory)
        told.append(inspection.words)
        assert inspection.alarm == (inspection.suspicion >= 1) == bool(inspection.words)
        return inspection.withhold

    assert ask(InspectionPolicy("off"), 1, params) == ""
    assert memory == {}
    assert ask(InspectionPolicy("refuse"), 1, params) == ""
    assert "linear.weight" in ask(InspectionPolicy("refuse"), 2, swapped(params))
    assert ask(InspectionPolicy("warn"), 3, swapped(params)) == ""
    assert [line.split(":")[0] for line in told] == ["", "", "round 2", "round 3"]
    assert bytes(memory[FIRST_NETWORK].tolist()).decode() == fingerprint(fed.model)


def owner(guard: str) -> OwnerConfig:
    text = f'client = 0\n[data]\nuse = "mnist5k"\n[[chain]]\nuse = "local_sgd"\nrate = 0.1\n{guard}'
    return OwnerConfig.parse(text, Path("owner.toml"))


def test_an_owners_file_names_mode_and_network() -> None:
    mine = owner('[guard]\ninspect = "refuse"\narchitecture = "ab"\nexamples = false').guard
    assert mine is not None
    assert mine.inspection_policy(private=False) == InspectionPolicy("refuse", "ab", examples=False)
    assert GuardPolicy().inspection_policy(private=False) == InspectionPolicy("off")
    assert GuardPolicy().inspection_policy(private=True) == InspectionPolicy("off", examples=False)
    with pytest.raises(SpecError, match=r"\[guard\].*inspect"):
        owner('[guard]\ninspect = "shout"')


def test_an_owners_folder_remembers_one_run_and_the_first_network(tmp_path: Path) -> None:
    state, inspection_policy, run = (
        ClientFolder(tmp_path),
        InspectionPolicy("refuse"),
        2**64 - 1,
    )  # Flower's numbers have 64 bits
    model = network()
    probes = ProbeSet(model, Batch(torch.zeros(0, 3, 9, 9), torch.zeros(0, dtype=torch.int64)), F.cross_entropy)
    params = detached_params(model)
    with state.inspection_memory(run) as memory:
        assert not inspection_policy.findings(probes, params, 1, memory).alarms
    with state.inspection_memory(run) as memory:
        assert inspection_policy.findings(probes, swapped(params), 2, memory).alarms
    with state.inspection_memory(run - 1) as memory:
        assert memory.keys() == {FIRST_NETWORK}
        assert not inspection_policy.findings(probes, swapped(params), 1, memory).alarms, (
            "another federation begins elsewhere"
        )
    assert (tmp_path / "inspected.safetensors").stat().st_mode & 0o077 == 0


def test_a_damaged_memory_is_told_to_the_owner(tmp_path: Path) -> None:
    (tmp_path / "inspected.safetensors").write_bytes(b"no tensors")
    with (
        pytest.raises(DamagedState, match="inspected.safetensors is damaged"),
        ClientFolder(tmp_path).inspection_memory(1),
    ):
        raise AssertionError("nothing is handed out")
