"""Small Flower apps as their authors write them: a plain one, and others that differ from it in some of its pieces."""

from textwrap import indent

APP = """\
{imports}import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

client = ClientApp()
server = ServerApp()


def examples(partition):
    digits = load_digits()
    mine = range(partition, 400, 10)[:{count}]
    return torch.tensor(digits.images[mine, None], dtype=torch.float32) / 16, torch.tensor(digits.target[mine])


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), {norm}nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(width * 64, {outputs})

    def forward(self, x):
        return {forward}


{further}@client.train({mods})
def train(message, context):
    net = {network}
    {load}
    x, y = examples(context.node_config["{partition}"])
    {optimizer}
{train}
    arrays = ArrayRecord({upload})
    records = {{"arrays": arrays, "metrics": MetricRecord({{"num-examples": {examples}}}){records}}}
    return Message(RecordDict(records), reply_to=message)


@server.main()
def main(grid, context):
    rounds = context.run_config["num-server-rounds"]
    start = ArrayRecord({start})
{server}
"""
PLAIN = {
    "imports": "",
    "count": "8",
    "norm": "",
    "outputs": "10",
    "forward": "self.head(self.body(x))",
    "further": "",
    "mods": "",
    "network": "Net()",
    "load": 'net.load_state_dict(message.content["arrays"].to_torch_state_dict())',
    "partition": "partition-id",
    "optimizer": "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)",
    "train": "nn.functional.cross_entropy(net(x), y).backward()\noptimizer.step()",
    "upload": "net.state_dict()",
    "examples": "len(y)",
    "records": "",
    "start": "Net().state_dict()",
    "server": "FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=rounds)",
}
CHANGED = "{k: v - old[k] for k, v in net.state_dict().items()}"
KEEP_OLD = PLAIN["load"] + "\n    old = {k: v.clone() for k, v in net.state_dict().items()}"
OWN_LOOP = """state = start
for _ in range(rounds):
    replies = grid.send_and_receive([Message(RecordDict({"arrays": state}), n, "train") for n in grid.get_node_ids()])
    states = [reply.content["arrays"].to_torch_state_dict() for reply in replies]
    state = ArrayRecord({name: sum(s[name] for s in states) / len(states) for name in states[0]})"""
BERT = {
    "imports": "import transformers\n",
    "further": """def network(kind):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=60, max_position_embeddings=16, **sizes, **drops)
    return getattr(transformers, f"BertFor{kind}Classification")(config)


""",
}
SHAPES: dict[str, dict[str, str]] = {
    "plain": {},
    "early_loss": {"train": "nn.functional.mse_loss(torch.zeros(1), torch.ones(1))\n" + PLAIN["train"]},
    # --------------------------------------------------------------------------------------------- the training
    "epochs": {
        "further": "def get_model(width: int) -> nn.Module:\n    return Net(width)\n\n\n",
        "network": "get_model(3)",
        "start": "get_model(3).state_dict()",
        "optimizer": """optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)""",
        "train": """for _ in range(3):
    for images, labels in DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True):
        optimizer.zero_grad()
        nn.CrossEntropyLoss(label_smoothing=0.1)(net((images - 0.3) / 0.2), labels).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        schedule.step()""",
    },
    "warmed_up": {
        "optimizer": """optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)""",
        "train": """for _ in range(4):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
    schedule.step()""",
    },
    "annealed": {
        "optimizer": """optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)""",
        "train": """for _ in range(3):
    for images, labels in zip(x.split(4), y.split(4), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    schedule.step()""",
    },
    "accumulated": {
        "optimizer": "optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)",
        "train": """for _ in range(2):
    for images, labels in zip(x.split(4), y.split(4), strict=True):
        (nn.functional.nll_loss(net(images).log_softmax(1), labels) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()""",
    },
    "repeated": {
        "train": """rows = [0, 1, 2, 1]
nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
optimizer.step()"""
    },
    "clipped_by_layer": {
        "train": """for steps in (optimizer, torch.optim.Adam(net.parameters())):
    steps.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    for p in net.parameters():
        nn.utils.clip_grad_norm_(p, 0.05)
    steps.step()"""
    },
    "closure": {
        "train": """def loss():
    optimizer.zero_grad()
    value = nn.functional.cross_entropy(net(x), y)
    value.backward()
    return value


optimizer.step(loss)"""
    },
    "threaded": {
        "imports": "from concurrent.futures import ThreadPoolExecutor\n\n",
        "train": """def fit():
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()


with ThreadPoolExecutor(1) as pool:
    pool.submit(fit).result()""",
    },
    "sharpened": {
        "train": """weights = [*net.parameters()]
nn.functional.cross_entropy(net(x), y).backward()
with torch.no_grad():
    away = [0.5 * p.grad / p.grad.norm() for p in weights]
    for p, step in zip(weights, away, strict=True):
        p += step
optimizer.zero_grad()
nn.functional.cross_entropy(net(x), y).backward()
with torch.no_grad():
    for p, step in zip(weights, away, strict=True):
        p -= step
optimizer.step()""",
    },
    "groups": {
        "optimizer": """groups = [{"params": net.body.parameters(), "lr": 0.01}, {"params": net.head.parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1)"""
    },
    "groups_of_steps": {
        "further": """class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.levels, self.head = nn.Embedding(17, 2), nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.levels((16 * x).long()).flatten(1))


""",
        "network": "Steps()",
        "optimizer": """groups = [{"params": net.head.parameters()}, {"params": net.levels.parameters(), "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1)""",
        "start": "Steps().state_dict()",
    },
    "by_hand": {
        "optimizer": "",
        "train": """for images, labels in zip(x.split(4), y.split(4), strict=True):
    net.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.05 * p.grad""",
    },
    "corrected": {
        "train": """for images, labels in zip(x.split(4), y.split(4), strict=True):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= optimizer.param_groups[0]["lr"] * p.grad"""
    },
    "private": {
        "train": """from opacus import PrivacyEngine

loader = DataLoader(TensorDataset(x, y), batch_size=8)
settings = {"noise_multiplier": 0.01, "max_grad_norm": 1.0, "poisson_sampling": False}
net, optimizer, loader = PrivacyEngine().make_private(
    module=net, optimizer=optimizer, data_loader=loader, **settings
)
for images, labels in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()""",
        "upload": "net._module.state_dict()",
    },
    "poisson": {
        "train": """from opacus import PrivacyEngine

torch.manual_seed(len(y))
loader = DataLoader(TensorDataset(x, y), batch_size=4)
settings = {"noise_multiplier": 0.01, "max_grad_norm": 1.0}
net, optimizer, loader = PrivacyEngine().make_private(
    module=net, optimizer=optimizer, data_loader=loader, **settings
)
for images, labels in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()""",
        "upload": "net._module.state_dict()",
    },
    "modified": {
        "imports": "from flwr.clientapp.mod import LocalDpMod\n",
        "further": "client = ClientApp(mods=[LocalDpMod(1.0, 0.5, 50.0, 1e-5)])\n\n\n",
    },
    "modified_in_training": {
        "imports": "from flwr.clientapp.mod import LocalDpMod\n",
        "mods": "mods=[LocalDpMod(1.0, 0.5, 50.0, 1e-5)]",
    },
    "clipped": {
        "imports": """from flwr.clientapp.mod import fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping as Private
""",
        "mods": "mods=[fixedclipping_mod]",
        "server": "Private(FedAvg(fraction_evaluate=0.0), 0.1, 0.01, 4).start(grid, start, num_rounds=rounds)",
    },
    # ------------------------------------------------------------------------------------------ labels and losses
    "multi_label": {
        "train": """findings = torch.stack([(y % 2 == k % 2).float() for k in range(10)], 1)
nn.BCEWithLogitsLoss(pos_weight=torch.full((10,), 3.0))(net(x), findings).backward()
optimizer.step()"""
    },
    "weighted": {
        "train": """loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 10), label_smoothing=0.1)
loss(net(x), y).backward()
optimizer.step()"""
    },
    "one_logit": {
        "outputs": "1",
        "train": """nn.functional.binary_cross_entropy_with_logits(net(x)[:, 0], (y > 4).float()).backward()
optimizer.step()""",
    },
    "prices": {
        "outputs": "1",
        "train": """nn.HuberLoss(delta=2.0)(net(x), y[:, None] / 3.0).backward()
optimizer.step()""",
    },
    "autoencoder": {
        "outputs": "64",
        "train": "nn.functional.mse_loss(net(x), x.flatten(1)).backward()\noptimizer.step()",
    },
    "windows": {
        "further": """class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv1d(8, 4, 3), nn.Linear(24, 10)

    def forward(self, x):
        return self.last(self.first(x).relu().flatten(1))


""",
        "network": "Conv()",
        "train": "nn.functional.cross_entropy(net(x[:, 0]), y).backward()\noptimizer.step()",
        "start": "Conv().state_dict()",
    },
    "segments": {
        "further": "def segmenter():\n    return nn.Conv2d(1, 1, 3, padding=1)\n\n\n",
        "network": "segmenter()",
        "train": "nn.BCEWithLogitsLoss()(net(x), (x > 0.5).float()).backward()\noptimizer.step()",
        "start": "segmenter().state_dict()",
    },
    "summed": {
        "optimizer": "optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1)",
        "train": """for images, labels in zip(x.split(4), y.split(4), strict=True):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels, reduction="sum").backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()""",
    },
    "proximal": {
        "imports": "from flwr.serverapp.strategy import FedProx\n",
        "load": KEEP_OLD,
        "train": """mu = message.content["config"]["proximal-mu"]
for images, labels in zip(x.split(4), y.split(4), strict=True):
    optimizer.zero_grad()
    away = sum((p - old[name]).square().sum() for name, p in net.named_parameters())
    (nn.functional.cross_entropy(net(images), labels) + mu / 2 * away).backward()
    optimizer.step()""",
        "server": PLAIN["server"].replace("FedAvg(", "FedProx(proximal_mu=0.5, "),
    },
    "penalised": {
        "train": """for images, labels in zip(x.split(4), y.split(4), strict=True):
    optimizer.zero_grad()
    size = sum(p.abs().sum() for p in net.parameters())
    (nn.functional.cross_entropy(net(images), labels) + 0.01 * size).backward()
    optimizer.step()"""
    },
    "smoothed": {
        "train": """logits = net(x)
smooth = nn.functional.cross_entropy(logits, y, label_smoothing=0.1)
(nn.functional.cross_entropy(logits, y) + smooth).backward()
optimizer.step()""",
    },
    "two_passes": {
        "train": """first, second = net(x[:4]), net(x[4:])
loss = nn.CrossEntropyLoss()
(loss(first, y[:4]) + loss(second, y[4:])).backward()
optimizer.step()"""
    },
    "sensitive": {
        "train": """near = x.clone().requires_grad_()
loss = nn.functional.cross_entropy(net(near), y)
(slope,) = torch.autograd.grad(loss, near, create_graph=True)
optimizer.zero_grad()
(loss + 1e-9 * slope.square().sum()).backward()
optimizer.step()"""
    },
    "meta": {
        "train": """from torch.func import functional_call

loss = nn.functional.cross_entropy(net(x[:4]), y[:4])
slopes = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
moved = {name: p - 0.1 * g for (name, p), g in zip(net.named_parameters(), slopes, strict=True)}
nn.functional.cross_entropy(functional_call(net, moved, (x[4:],)), y[4:]).backward()
optimizer.step()"""
    },
    "views": {
        "outputs": "6",
        "train": """nn.functional.cross_entropy(net(x) @ net(x.flip(3)).T, torch.arange(len(x))).backward()
optimizer.step()""",
    },
    "two_networks": {
        "train": """other = nn.Linear(10, 10)
optimizer.add_param_group({"params": other.parameters()})
nn.functional.cross_entropy(other(net(x)), y).backward()
optimizer.step()"""
    },
    "by_turns": {
        "further": """class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.makes = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.judges = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))


""",
        "network": "Pair()",
        "optimizer": "makes, judges = (torch.optim.Adam(part.parameters()) for part in (net.makes, net.judges))",
        "train": """compare, yes, no = nn.BCEWithLogitsLoss(), torch.ones(len(x), 1), torch.zeros(len(x), 1)
made = net.makes(torch.randn(len(x), 4))
(compare(net.judges(x), yes) + compare(net.judges(made.detach()), no)).backward()
judges.step()
makes.zero_grad()
compare(net.judges(made), yes).backward()
makes.step()""",
        "start": "Pair().state_dict()",
    },
    "distilled": {
        "load": PLAIN["load"] + "\n    old = Net()\n    old.load_state_dict(net.state_dict())",
        "train": """with torch.no_grad():
    soft = old(x).softmax(1)
logits = net(x)
(nn.functional.kl_div(logits.log_softmax(1), soft) + nn.functional.cross_entropy(logits, y)).backward()
optimizer.step()""",
    },
    "ignored": {
        "train": """y[0] = -100
nn.functional.cross_entropy(net(x), y).backward()
optimizer.step()""",
    },
    "decayed": {
        "network": "Net()\n    net.body.requires_grad_(False)",
        "optimizer": """trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, weight_decay=0.1)""",
    },
    "dropped": {"norm": "nn.Dropout(0.2), "},
    "outside": {
        "outputs": "1",
        "train": """nn.functional.binary_cross_entropy(net(x).sigmoid()[:, 0], (y > 4).float()).backward()
optimizer.step()""",
    },
    "amplified": {
        "forward": "self.head(self.body((1e4 * x).sin()))",
        "train": PLAIN["train"].replace("net(x)", "net((x - 0.3) / 0.2)"),
    },
    "compiled": {"train": PLAIN["train"].replace("net(x)", 'torch.compile(net, backend="eager")(x)')},
    "in_parts": {
        "optimizer": """parts = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (net.body, net.head)]""",
        "train": """for images, labels in zip(x.split(4), y.split(4), strict=True):
    net.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    for part in parts:
        part.step()""",
    },
    "by_phases": {
        "train": """for phase, images, labels in zip((net.head, net.body), x.split(4), y.split(4), strict=True):
    net.requires_grad_(False)
    phase.requires_grad_(True)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
net.requires_grad_(True)""",
    },
    "denoised": {
        "further": "def denoiser():\n    return nn.Conv2d(1, 1, 3, padding=1)\n\n\n",
        "network": "denoiser()",
        "train": "nn.functional.mse_loss(net(x + 0.1 * (7 * x).sin()), x).backward()\noptimizer.step()",
        "start": "denoiser().state_dict()",
    },
    "phased": {
        "further": "def second():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n\n\n",
        "load": """sent = message.content["arrays"].to_torch_state_dict()
    net = second() if "1.weight" in sent else net
    net.load_state_dict(sent)""",
        "server": f"{OWN_LOOP}\nstate = ArrayRecord(second().state_dict())\n{OWN_LOOP.partition(chr(10))[2]}",
    },
    "configured": {
        "imports": "from dataclasses import dataclass\n\n",
        "further": """@dataclass
class Sizes:
    width: int
    bias: bool | None = None


class Sized(Net):
    def __init__(self, sizes: Sizes, settings: dict[str, int | str]):
        super().__init__(sizes.width + settings["rounds more"])


""",
        "network": "Sized(Sizes(2), {'rounds more': 1, 'name': 'sized'})",
        "start": "Sized(Sizes(2), {'rounds more': 1, 'name': 'sized'}).state_dict()",
    },
    "activated": {
        "further": """class Activated(Net):
    def __init__(self, activation=nn.ReLU):
        super().__init__()
        self.body[1] = activation()


""",
        "network": "Activated(nn.Tanh)",
        "start": "Activated(nn.Tanh).state_dict()",
    },
    "set_by_a_class": {
        "imports": "from dataclasses import dataclass\n\n",
        "further": """@dataclass
class Settings:
    activation: type = nn.ReLU


class Chosen(Net):
    def __init__(self, settings):
        super().__init__(3)
        self.body[1] = settings.activation()


""",
        "network": "Chosen(Settings(nn.Tanh))",
        "start": "Chosen(Settings(nn.Tanh)).state_dict()",
    },
    "odd_arguments": {
        "imports": "from pathlib import Path\n\nimport numpy as np\n",
        "further": """class Odd(Net):
    def __init__(self, width, table, parts, rows, name, device, seed=None, activation=None):
        if table or rows[0]["wide"] != [1, 2] or "  " not in str(name) or torch.device(device).type != "cpu" or seed is not None:
            width = 1
        super().__init__(width + parts["first"]["width more"])
        activation = activation or nn.ReLU
        self.body[1] = activation()


""",
        "network": """Odd(
        np.int64(2), {}, {"first": {"width more": 1}}, [{"wide": [1, 2]}], Path("two  spaces"), torch.device("cpu")
    )""",
        "start": "Odd(2, {}, {'first': {'width more': 1}}, [{'wide': [1, 2]}], '  ', 'cpu').state_dict()",
    },
    "doubled_inside": {
        "further": "def network():\n    torch.set_default_dtype(torch.float64)\n    return Net()\n\n\n",
        "network": "network()",
        "train": PLAIN["train"].replace("net(x)", "net(x.double())"),
        "start": "network().state_dict()",
    },
    "doubled": {
        "further": "torch.set_default_dtype(torch.float64)\n\n\n",
        "train": PLAIN["train"].replace("net(x)", "net(x.double())"),
    },
    "counted": {
        "further": """@client.train("count")
def count(message, context):
    mean = Net()(examples(0)[0]).mean().item()
    return Message(RecordDict({"metrics": MetricRecord({"mean": mean, "num-examples": 8})}), reply_to=message)


""",
        "server": """nodes = list(grid.get_node_ids())
grid.send_and_receive([Message(RecordDict(), node, "train.count") for node in nodes])
""" + PLAIN["server"],
    },
    # ---------------------------------------------------------------------------------------------- the network
    "library": {
        "imports": "from torchvision.models import resnet18\n",
        "count": "2",
        "network": "resnet18(num_classes=10)",
        "train": """images = nn.functional.interpolate(x, scale_factor=4).expand(-1, 3, -1, -1)
net.eval()
nn.functional.cross_entropy(net(images), y).backward()
optimizer.step()""",
        "start": "resnet18(num_classes=10).state_dict()",
    },
    "batch_norm": {
        "norm": "nn.BatchNorm2d(width), ",
        "further": "def half(state):\n    return {k: v.half() if v.is_floating_point() else v for k, v in state.items()}\n\n\n",
        "upload": "half(net.state_dict())",
        "start": "half(Net().state_dict())",
    },
    "settled_norm": {"norm": "nn.BatchNorm2d(width), ", "optimizer": PLAIN["optimizer"] + "\n    net.body.eval()"},
    "pictures": {
        "imports": "from transformers import ResNetConfig, ResNetForImageClassification\n",
        "further": """def network():
    sizes = {"num_channels": 1, "embedding_size": 4, "hidden_sizes": [4], "depths": [1], "num_labels": 10}
    return ResNetForImageClassification(ResNetConfig(**sizes))


""",
        "network": "network()",
        "train": "net(pixel_values=x, labels=y).loss.backward()\noptimizer.step()",
        "start": "network().state_dict()",
    },
    "tags": {
        **BERT,
        "network": 'network("Token")',
        "train": "net(input_ids=y.view(2, 4), labels=y.view(2, 4) % 2).loss.backward()\noptimizer.step()",
        "start": 'network("Token").state_dict()',
    },
    "next_words": {  # whose state_dict has a tied weight twice
        "imports": "from transformers import GPT2Config, GPT2LMHeadModel\n",
        "further": """def network():
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=16, n_embd=64, n_layer=2, n_head=2, **drop))


""",
        "network": "network()",
        "train": """rng = torch.Generator().manual_seed(context.node_id - 1)
ids = torch.randint(0, 59, (2, 8), generator=rng)
nn.functional.cross_entropy(net(ids).logits[:, :-1].reshape(-1, 60), ids[:, 1:].reshape(-1)).backward()
optimizer.step()""",
        "examples": "2",
        "start": "network().state_dict()",
    },
    "sentences": {
        **BERT,
        "network": 'network("Sequence")',
        "train": """rng = torch.Generator().manual_seed(context.node_id - 1)
ids = torch.randint(5, 60, (1, 8), generator=rng)
net(input_ids=ids, attention_mask=torch.ones_like(ids), labels=y[:1] % 2).loss.backward()
optimizer.step()""",
        "start": 'network("Sequence").state_dict()',
    },
    "frozen": {
        "further": "def body():\n    torch.manual_seed(0)\n    return Net()\n\n\n",
        "network": "body()",
        "load": PLAIN["load"].replace("net.", "net.head."),
        "optimizer": "net.body.requires_grad_(False)\n    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.1)",
        "upload": "net.head.state_dict()",
        "start": "body().head.state_dict()",
    },
    "double_head": {
        "further": "def network():\n    net = Net()\n    net.head.double()\n    return net\n\n\n",
        "forward": "self.head(self.body(x).double())",
        "network": "network()",
        "start": "network().state_dict()",
    },
    "tied": {
        "further": """class Twins(Net):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(256, 10)
        self.other.weight = self.head.weight


def sent(net):
    return {name: t for name, t in net.state_dict().items() if name != "head.weight"}


""",
        "network": "Twins()",
        "load": PLAIN["load"].replace(")", "), strict=False", 1),
        "upload": "sent(net)",
        "start": "sent(Twins())",
    },
    "rows": {
        "further": """class Dense(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


""",
        "network": "Dense()",
        "train": "nn.functional.cross_entropy(net(x.flatten(1)), y).backward()\noptimizer.step()",
        "start": "Dense().state_dict()",
    },
    "features": {
        "further": "def body():\n    torch.manual_seed(0)\n    return nn.Linear(64, 16)\n\n\n"
        "def head():\n    return nn.Linear(16, 10)\n\n\n",
        "network": "head()",
        "train": """with torch.no_grad():
    seen = body()(x.flatten(1))
nn.functional.cross_entropy(net(seen), y).backward()
optimizer.step()""",
        "start": "head().state_dict()",
    },
    "functional": {
        "optimizer": "",
        "train": """from torch.func import functional_call, grad, vmap


def loss(params, image, label):
    return nn.functional.cross_entropy(functional_call(net, params, (image[None],)), label[None])


params = {name: p.detach() for name, p in net.named_parameters()}
gradients = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
for name, p in net.named_parameters():
    p.data -= 0.1 * gradients[name].mean(0)""",
    },
    # ----------------------------------------------------------------------------------------------- the clients
    "retrying": {"train": PLAIN["train"] + "\nimport time\nprint('Retrying in 1s', flush=True)\ntime.sleep(1)"},
    "decaying": {"optimizer": PLAIN["optimizer"].replace("0.1", '0.1 / message.content["config"]["server-round"]')},
    "skipping": {
        "load": """if (context.node_id + message.content["config"]["server-round"]) % 2 == 0:
        skipped = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 8})}
        return Message(RecordDict(skipped), reply_to=message)
    """ + PLAIN["load"],
    },
    "popped": {"optimizer": PLAIN["optimizer"].replace("0.1", '0.1 * message.content["config"].pop("server-round")')},
    "unequal": {"count": "8 - partition % 2"},
    # ---------------------------------------------------------------------------------------------- the uploads
    "gradients": {
        "optimizer": "",
        "train": "nn.functional.cross_entropy(net(x), y).backward()",
        "upload": "{name: p.grad for name, p in net.named_parameters()}",
    },
    "deltas": {"load": KEEP_OLD, "upload": CHANGED},
    "shortened": {"load": KEEP_OLD, "upload": CHANGED.replace("v - old[k]", "(v + old[k]) / 2")},
    "descents": {"load": KEEP_OLD, "upload": CHANGED.replace("v - old[k]", "old[k] - v")},
    "two_records": {"records": ', "extra": ArrayRecord([torch.ones(3).numpy()])', "server": OWN_LOOP},
    "batches": {
        "train": """for images, labels in zip(x.split(4), y.split(4), strict=True):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()""",
        "examples": "2",
    },
    "prefixed": {
        "further": 'def wrapped(state):\n    return {f"_module.{name}": t for name, t in state.items()}\n\n\n',
        "load": PLAIN["load"].replace("net.", "nn.ModuleDict({'_module': net})."),
        "upload": "wrapped(net.state_dict())",
        "start": "wrapped(Net().state_dict())",
    },
    "own_head": {
        "load": """net.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    if "head" in context.state:
        net.head.load_state_dict(context.state["head"].to_torch_state_dict())""",
        "train": PLAIN["train"] + '\ncontext.state["head"] = ArrayRecord(net.head.state_dict())',
        "upload": '{f"body.{name}": t for name, t in net.body.state_dict().items()}',
        "start": '{f"body.{name}": t for name, t in Net().body.state_dict().items()}',
    },
    "packed": {
        "imports": "import io\n\nfrom flwr.app import ConfigRecord\n",
        "further": """def packed(state):
    file = io.BytesIO()
    torch.save(state, file)
    return ConfigRecord({"weights": file.getvalue()})


""",
        "load": 'net.load_state_dict(torch.load(io.BytesIO(message.content["packed"]["weights"])))',  # an app's; weights only
        "upload": "{}",
        "records": ', "packed": packed(net.state_dict())',
        "server": """for node in grid.get_node_ids():
    grid.send_and_receive([Message(RecordDict({"packed": packed(Net().state_dict())}), node, "train")])""",
    },
    # ----------------------------------------------------------------------------------------------- the server
    "own_loop": {"server": OWN_LOOP},
    "own_strategy": {
        "further": """class Mine(FedAvg):
    def start(self, grid, arrays, rounds, *, hurry=True):
        for round in range(1, rounds + 1):
            messages = self.configure_train(round, arrays, self.config, grid)
            arrays, _ = self.aggregate_train(round, grid.send_and_receive(messages))


""",
        "server": """mine = Mine(fraction_evaluate=0.0)
mine.config = __import__("flwr").app.ConfigRecord()
mine.start(grid, start, rounds, hurry=False)""",
    },
    "files": {
        "imports": "from pathlib import Path\n\n",
        "optimizer": 'optimizer = torch.optim.SGD(net.parameters(), lr=float(Path("rate.txt").read_text()))',
        "train": PLAIN["train"] + '\ntorch.save(net.state_dict(), "model.pt")',
    },
    "script": {
        "imports": """import argparse
from pathlib import Path

argparse.ArgumentParser().parse_args()
Path(__file__).with_name("log.txt").write_text("started")
with Path("rate.txt").open("a") as file:
    file.write("  ")
"""
    },
    # ------------------------------------------------------------------- passes and steps that are no training
    "sized": {
        "further": """class Sized(nn.Module):
    def __init__(self, width=4, pixels=(8, 8)):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, width, 3), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(self.body(torch.zeros(1, 1, *pixels)).numel(), 10)

    def forward(self, x):
        return self.head(self.body(x))


""",
        "network": "Sized(6)",
        "start": "Sized(6).state_dict()",
    },
    "lazy": {
        "further": """class Lazy(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.LazyConv2d(width, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


def network(width=4):
    net = Lazy(width)
    net(torch.zeros(1, 1, 8, 8))
    return net


""",
        "network": "network(6)",
        "start": "network(6).state_dict()",
    },
    "measured": {
        "train": """nn.functional.cross_entropy(net(x), y).item()
for images, labels in zip(x.split(4), y.split(4), strict=True):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()
    (net(images).argmax(1) == labels).float().mean().item()""",
    },
    "compared": {
        "train": """logits = net(x)
with torch.no_grad():
    net(x[:3])
nn.functional.cross_entropy(logits, y).backward()
optimizer.step()""",
    },
    "taught": {
        "further": "class Teacher(Net):\n    pass\n\n\n",
        "train": """teacher = Teacher()
soft = teacher(x).softmax(1).detach()
logits = net(x)
(0.0 * nn.functional.kl_div(logits.log_softmax(1), soft) + nn.functional.cross_entropy(logits, y)).backward()
optimizer.step()""",
    },
    "adversarial": {
        "train": """for images, labels in zip(x.split(4), y.split(4), strict=True):
    near = images.clone().requires_grad_()
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(near), labels).backward()
    (slope,) = torch.autograd.grad(nn.functional.cross_entropy(net(near), labels), near)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images + 0.1 * (near.grad + slope).sign()), labels).backward()
    optimizer.step()""",
    },
    "capturable": {"optimizer": "optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01))"},
    "signs": {
        "further": """class Signs(torch.optim.Optimizer):
    def __init__(self, params, size):
        super().__init__(params, {"size": size})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["size"])


""",
        "optimizer": "optimizer = Signs(net.parameters(), 0.01)",
    },
    "methods": {
        "further": """class Matrix(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(64, 10))

    def logits(self, x):
        return x.flatten(1) @ self.weight


""",
        "network": "Matrix()",
        "train": PLAIN["train"].replace("net(x)", "net.logits(x)"),
        "start": "Matrix().state_dict()",
    },
    "personal": {
        "imports": "from copy import deepcopy\n",
        "train": """own = deepcopy(net)
step = torch.optim.SGD(own.parameters(), lr=0.1)
nn.functional.cross_entropy(own(x), y).backward()
step.step()
nn.functional.cross_entropy(net(x), y).backward()
optimizer.step()""",
    },
    "checkpointed": {
        "imports": "from torch.utils.checkpoint import checkpoint\n",
        "forward": "self.head(checkpoint(self.body, x, use_reentrant=False))",
        "train": "\n".join([PLAIN["train"], "optimizer.zero_grad()", PLAIN["train"]]),
    },
    "drawn": {"forward": "self.head(nn.functional.dropout(self.body(x), 0.2, self.training))"},
    "ragged": {
        "train": """for images, labels in zip(x.split([3, 5]), y.split([3, 5]), strict=True):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(images), labels).backward()
    optimizer.step()""",
    },
    "softened": {
        "train": """wanted = nn.functional.one_hot(y, 10).float()
nn.functional.mse_loss(net(x).softmax(1), wanted).backward()
optimizer.step()""",
    },
    "unlike": {"optimizer": PLAIN["optimizer"].replace("0.1", "0.1 * context.node_id")},
    "gaps": {
        "forward": "self.head(self.body(x.nan_to_num()))",
        "train": PLAIN["train"].replace("net(x)", "net(x.where(x > 0, torch.nan))"),
    },
    "pixels": {
        "forward": "self.head(self.body(x.float() / 255))",
        "train": PLAIN["train"].replace("net(x)", "net((255 * x).byte())"),
    },
    "transformed": {
        "imports": "from torchvision.transforms import v2\n",
        "train": PLAIN["train"].replace("net(x)", "net(v2.Compose([v2.Normalize([0.3], [0.2])])(x))"),
    },
    "stretched": {
        "further": """class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv1d(8, 4, 3), nn.Linear(4, 10)

    def forward(self, x):
        return self.last(self.first(x).relu().mean(2))


""",
        "network": "Conv()",
        "train": PLAIN["train"].replace("net(x)", "net(x[:, 0, :, : 8 - context.node_id % 2])"),
        "start": "Conv().state_dict()",
    },
    "sequences": {
        "further": """class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.Conv1d(8, 3, 1)

    def forward(self, x):
        return self.each(x)


""",
        "network": "Steps()",
        "train": "nn.functional.cross_entropy(net(x[:, 0]), (x[:, 0].mean(1) > 0.3).long()).backward()\noptimizer.step()",
        "start": "Steps().state_dict()",
    },
    # --------------------------------------------------------------------------------------- hard to observe
    "traced": {"load": PLAIN["load"] + "\n    net.zero_grad()\n    seen = torch.jit.trace(net, torch.zeros(1, 1, 8, 8))"},
    "profiled": {
        "imports": "import cProfile\n",
        "train": f"""profile = cProfile.Profile()
profile.enable()
{PLAIN["train"]}
profile.disable()
assert "run_backward" in str(profile.getstats())""",
    },
    "stateful": {
        "forward": PLAIN["forward"] + """

    def get_extra_state(self):
        return {"version": 1}

    def set_extra_state(self, state):
        pass""",
        "load": PLAIN["load"][:-1] + ", strict=False)",
        "upload": "dict(net.named_parameters())",
        "start": "dict(Net().named_parameters())",
    },
    "rebound": {"imports": "def build(**options):\n    options = None\n    return Net()\n", "network": "build()"},
    "empty": {
        "train": """nn.functional.cross_entropy(net(x[:0]), y[:0], reduction="sum").backward()
optimizer.step()""",
    },
    "half": {
        "network": "Net().bfloat16()",
        "train": PLAIN["train"].replace("net(x)", "net(x.bfloat16())"),
        "upload": "{k: v.float() for k, v in net.state_dict().items()}",
    },
    "scripted": {"network": "torch.jit.script(Net())"},
    # --------------------------------------------------------------------------------------- nothing to attack
    "trees": {
        "imports": "import numpy as np\n",
        "load": "booster = np.frombuffer(b'a booster of trees', np.uint8)",
        "optimizer": "",
        "train": "",
        "upload": "[booster]",
        "start": "[np.frombuffer(b'a booster of trees', np.uint8)]",
    },
    "linear": {
        "imports": "import numpy as np\nfrom sklearn.linear_model import LogisticRegression\n",
        "count": "40",
        "load": "",
        "optimizer": "",
        "train": "fitted = LogisticRegression(max_iter=20).fit(x.flatten(1).numpy(), y.numpy())",
        "upload": "[np.resize(fitted.coef_, (10, 64)), np.resize(fitted.intercept_, 10)]",
        "start": "[np.zeros((10, 64)), np.zeros(10)]",
    },
    # ------------------------------------------------------------------------------------------- does not train
    "ends": {"imports": "import os\n\n", "train": "os._exit(0)"},
    "exits": {"imports": "import sys\n\n", "server": "sys.exit(3)"},
    "missing": {"imports": "import a_package_that_nobody_has\n"},
    "broken": {"further": "LOADED = load_digits().no_such_thing\n\n\n"},
    "raises": {"train": 'raise RuntimeError("no data for client 3")'},
    "no_partition": {"partition": "site"},
    "waits": {
        # Flower asks again after a second
        "imports": "from flwr.serverapp.strategy import strategy_utils\nstrategy_utils.sleep = lambda seconds: None\n",
        "server": PLAIN["server"].replace("0.0", "0.0, min_available_nodes=1000"),
    },
}  # fmt: skip
GROUPS = SHAPES["groups_of_steps"]
SHAPES["close_groups"] = {**GROUPS, "optimizer": GROUPS["optimizer"].replace("1.0", "0.08")}


def source(name: str) -> str:
    """The code of an app."""
    pieces = PLAIN | SHAPES[name]
    blocks = {key: indent(pieces[key], "    ") for key in ("train", "server")}
    return APP.format(**pieces | blocks)
