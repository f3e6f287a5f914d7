"""The code of docs/adding-components.md: what a component writes and what it is handed, with types and meanings."""

import ast
import inspect
import pkgutil
import textwrap
from functools import cached_property

from fedgauge.simulations.cli.scenario_keys import meanings_of

# by kind: methods that a component writes, and classes whose values it is handed or returns
TARGETS = {
    "dataset": ("client.data.images:Dataset",),
    "loss": ("client.models.losses:Criterion.__call__",),
    "link": (
        "client.transforms:UpdateTransform.apply",
        "client.transforms:BatchTransform.transform",
        "client.transforms:StatefulTransform.initial",
        "client.transforms:StatefulTransform.advance",
        "client.transforms:Link.mean",
        "client.transforms:Link.update_distribution",
        "client.transforms:UpdateDistribution",
        "client.update:Batch",
    ),
    "attack": (
        "attacks.base:Attack.reconstruct",
        "attacks.base:Wave",
        "attacks.base:Wave.alone",
        "attacks.base:Knowledge",
        "attacks.base:Knowledge.forward",
        "attacks.base:Budget",
        "attacks.base:Reconstruction",
        "attacks.base:StatefulAttack.initial",
        "attacks.base:StatefulAttack.advance",
    ),
    "other": (
        "attacks.matching.priors:Prior.bind",
        "attacks.malicious.server_attack:ServerAttack.craft",
        "attacks.modality.image_metrics:Metric",
        "client.deployment.deployed_client:SelfAudit.leak",
    ),
}


def code_of(kind: str) -> str:
    """The signatures of a kind as Python, under the modules that they are imported from."""
    lines, module = [], ""
    for path in TARGETS[kind]:
        if path.partition(":")[0] != module:
            module = path.partition(":")[0]
            lines.append(f"# from fedgauge.{module}")
        lines += _written(f"fedgauge.{path}")
    return "\n".join(lines) + "\n"


def _written(path: str) -> list[str]:
    target = pkgutil.resolve_name(path)
    value = isinstance(target, property | cached_property)
    if value:
        target = target.func if isinstance(target, cached_property) else target.fget
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(target))).body
    docstring = inspect.getdoc(target) or ""
    if isinstance(node, ast.ClassDef):
        meanings = meanings_of(docstring)
        fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
        rows = [(ast.unparse(field), meanings.get(ast.unparse(field.target), "")) for field in fields]
        return [
            f"class {node.name}:  # {_first(docstring)}",
            *(f"    {field}" + (f"  # {meaning.rstrip('.')}" if meaning else "") for field, meaning in rows),
        ]
    assert isinstance(node, ast.FunctionDef) and node.returns is not None
    arguments = ":" if value else f"({ast.unparse(node.args)}) ->"
    return [f"{path.partition(':')[2]}{arguments} {ast.unparse(node.returns)}", f"    # {_first(docstring)}"]


def _first(docstring: str) -> str:
    return " ".join(docstring.partition("\n\n")[0].split()).rstrip(".")


def block(kind: str) -> str:
    """Return a kind's signatures as a fenced block."""
    return f"```py\n{code_of(kind)}```\n"
