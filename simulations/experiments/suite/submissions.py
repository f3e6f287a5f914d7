"""Attacks and defenses of other people in a paper's table: each cell gets them on the cell's own terms."""

from collections.abc import Sequence
from dataclasses import replace

from fedgauge.client.components import SpecError, Table
from fedgauge.server.store.scenario import apply_setting
from fedgauge.simulations.experiments.paper_tables import AttackSpec, PaperTable, Setting, check_link

NOT_SUBMITTED = ("iterations", "restarts", "seconds", "labels", "lengths", "metrics", "auxiliary")  # the cell decides


def with_submissions(paper_table: PaperTable, attacks: Sequence[str], defenses: Sequence[str]) -> PaperTable:
    """The table with further attacks in every cell, and for each defense a further cell beside each one that has none.

    An attack gets the budget, knowledge and metrics of the cell's first attack. A defense stands before local training, so it
    acts on gradients.

    Args:
        attacks, defenses: components as text, such as 'mine:sharper rate=0.1'.

    Raises:
        SpecError: a component is unknown, has no such argument, or names what the cell decides.
    """
    if not attacks and not defenses:
        return paper_table
    if paper_table.world is not None:
        raise SpecError(f"{paper_table.name} is a world of its own: it takes no --attack and no --defense")
    tables = [component(text, "--attack") for text in attacks]
    links = [component(text, "--defense") for text in defenses]
    for link in links:
        check_link({key: value for key, value in link.items() if key != "name"}, "--defense")
    cells = [cell for cell in paper_table.cells]
    cells += [_defended(cell, link) for link in links for cell in paper_table.cells if len(cell.chain) == 1]
    return replace(paper_table, cells=tuple(_attacked(cell, tables) for cell in cells))


def component(text: str, option: str) -> Table:
    """A component and its settings from text: 'mine:sharper rate=0.1'."""
    use, *settings = text.split() or [""]
    if not use:
        raise SpecError(f"{option} is empty: name a component, such as {option} 'mine:sharper rate=0.1'")
    table: dict[str, object] = {"use": use}
    for setting in settings:
        apply_setting(table, setting)
    if wrong := [key for key in table if key in NOT_SUBMITTED]:
        raise SpecError(f"{option}: {wrong[0]} is the same for every attack of a cell; leave it out")
    return table


def _called(table: Table) -> str:
    return str(table.get("name") or str(table["use"]).rpartition(":")[2])


def _attacked(cell: Setting, tables: Sequence[Table]) -> Setting:
    like = cell.attacks[0]
    own = {attack.name for attack in cell.attacks}
    added = []
    for table in tables:
        name = _called(table)
        if name in own:
            raise SpecError(f"--attack: cell {cell.name} has an attack called {name} already; add name=another")
        spec = replace(like, name=name, table={k: v for k, v in table.items() if k != "name"}, paper={}, against="")
        _check(spec)
        added.append(spec)
    return replace(cell, attacks=(*cell.attacks, *added))


def _check(spec: AttackSpec) -> None:
    try:
        spec.build()
    except SpecError as error:
        raise SpecError(f"--attack: {error}") from error


def _defended(cell: Setting, link: Table) -> Setting:
    settings = {k: v for k, v in link.items() if k != "name"}
    return replace(cell, name=f"{cell.name}, {_called(link)}", chain=(settings, *cell.chain))
