"""A Flower app of one's own, written in the layout that `flwr build` bundles and Flower Hub takes."""

from importlib.metadata import distribution
from pathlib import Path

from flwr.supercore.utils import is_valid_name

from fedgauge.client.components import SpecError

EXAMPLE = Path(__file__).parents[1] / "example_app"
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "Trains on digits with Flower, and shows what its server could read off the updates."
license = {{ file = "LICENSE" }}
dependencies = ["{flower}", "fedgauge"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "{publisher}"                # your account of Flower Hub
fab-format-version = 1
flwr-version-target = "{target}"         # the Flower that it was tried with

[tool.flwr.app.components]
serverapp = "{module}.server_app:app"
clientapp = "{module}.client_app:app"

[tool.flwr.app.config]
num-server-rounds = 2
batch-size = 1           # digits that a client trains on in a round
learning-rate = 0.1
record-to = ""           # where the curious server's run folder goes; empty: nobody is curious
"""
AUDIT = """\
# What the curious server takes the clients of this app to do, and what it tries.
rounds = 2
clients = 2

[data]                   # public data: what the attacker knows of the distribution
use = "mnist5k"
batch_size = 1
auxiliary = 200

[model]
use = "{module}.task:Net"

[[chain]]
use = "local_sgd"
rate = 0.1

[[attack]]
use = "analytic"

[audit]
executor = "local"
"""
READ_ME = """\
# {name}

A Flower app whose clients train on digits, and whose server shows what it could read off their updates. Needs fedgauge.

```sh
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1    # where fedgauge is installed, and in no package index
flwr run . --stream --run-config "record-to='$PWD/runs/curious'"
fedgauge audit runs/curious --allow {module}
```

`{module}/audit.toml` says what the server takes the clients to do. `runs/` holds what is reconstructed of private data: it stays
out of the bundle. Before you publish the app (`flwr login`, then `flwr app publish .`) set `publisher` in `pyproject.toml` and a
licence of yours.
"""


def write_app(folder: Path, publisher: str) -> None:
    """Write the example app into a new folder, whose name becomes the app's.

    Raises:
        SpecError: the folder exists, or Flower takes no such name.
    """
    name = folder.resolve().name
    for word in (name, publisher):
        if not is_valid_name(word)[0]:
            raise SpecError(f"Flower takes letters, digits and hyphens, a letter first, as a name, and not {word!r}")
    if folder.exists():
        raise SpecError(f"{folder} exists; choose another name")
    ours = distribution("fedgauge")
    flower = next(r.partition(";")[0].strip() for r in ours.requires or [] if r.startswith("flwr["))
    module = name.replace("-", "_").lower()
    target = distribution("flwr").version
    words = dict(name=name, module=module, publisher=publisher, flower=flower, target=target)
    (folder / module).mkdir(parents=True)
    for path in EXAMPLE.glob("*.py"):
        (folder / module / path.name).write_text(path.read_text().replace("fedgauge.simulations.example_app", module))
    (folder / module / "__init__.py").write_text(f'"""{name}: a Flower app that a curious server watches."""\n')
    (folder / module / "audit.toml").write_text(AUDIT.format(**words))
    (folder / "pyproject.toml").write_text(PROJECT.format(**words))
    (folder / "README.md").write_text(READ_ME.format(**words))
    # a checkout's, where nothing is installed
    license = ours.read_text("licenses/LICENSE") or (Path(__file__).parents[2] / "LICENSE").read_text()
    (folder / "LICENSE").write_text(license)
    (folder / ".gitignore").write_text("runs/\n")
