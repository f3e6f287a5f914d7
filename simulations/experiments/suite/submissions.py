"""Attacks and defenses of other people in a paper's table: each cell gets them on the cell's own terms."""

from collections.abc import Sequence
from dataclasses import replace

from fedgauge.attacks.plan import attack_name, modalities_of
from fedgauge.client.components import SpecError, Table
from fedgauge.server.store.scenario import component_of
from fedgauge.simulations.experiments.paper_tables import AttackSpec, PaperTable, Setting, check_link

NOT_SUBMITTED = ("iterations", "restarts", "seconds", "labels", "lengths", "metrics", "auxiliary")  # the cell decides


def with_submissions(paper_table: PaperTable, attacks: Sequence[str], defenses: Sequence[str]) -> PaperTable:
    """The table with further attacks in every cell that they fit, and for each defense a cell beside each one without.

    An attack gets the budget, knowledge and metrics of the cell's first attack. A test of membership fits cells of members, and a
    registered attack those of its kind of data. A defense stands before local training, so it acts on gradients.

    Args:
        attacks, defenses: components as text, such as 'mine:sharper rate=0.1'.

    Raises:
        SpecError: a component is unknown, has no such argument, names what the cell decides, or fits no cell.
    """
    if not attacks and not defenses:
        return paper_table
    tables = [component(text, "--attack") for text in attacks]
    links = [component(text, "--defense") for text in defenses]
    for link in links:
        check_link({key: value for key, value in link.items() if key != "name"}, "--defense")
    cells = [cell for cell in paper_table.cells]
    cells += [_defended(cell, link) for link in links for cell in paper_table.cells if len(cell.chain) == 1]
    made = tuple(_attacked(cell, tables) for cell in cells)
    for table in tables:
        if not any(spec.name == _called(table) for cell in made for spec in cell.attacks):
            raise SpecError(
                f"--attack: {_called(table)} fits none of the chosen cells, {', '.join(cell.name for cell in cells)}: choose "
                "others with --cells"
            )
    return replace(paper_table, cells=made)


def component(text: str, option: str) -> Table:
    """A component and its settings from text: 'mine:sharper rate=0.1'."""
    table = component_of(text, option)
    if wrong := [key for key in table if key in NOT_SUBMITTED]:
        raise SpecError(f"{option}: {wrong[0]} is the same for every attack of a cell; leave it out")
    if not _called(table):
        raise SpecError(f"{option}: name must be a text of at least one letter, or left out")
    return table


def called(text: str) -> str:
    """The name of a submitted attack, from its text."""
    return _called(component(text, "--attack"))


def _called(table: Table) -> str:
    return str(attack_name(table))


def _attacked(cell: Setting, tables: Sequence[Table]) -> Setting:
    like = cell.attacks[0]
    own = {attack.name for attack in cell.attacks}
    added = []
    for table in tables:
        name = _called(table)
        if name in own:
            raise SpecError(f"--attack: cell {cell.name} has an attack called {name} already; add name=another")
        spec = replace(like, name=name, table={k: v for k, v in table.items() if k != "name"}, paper={}, against="")
        try:
            spec.build()
        except SpecError as error:
            raise SpecError(f"--attack: {error}") from error
        if _fits(spec, like):
            added.append(spec)
    return replace(cell, attacks=(*cell.attacks, *added))


def _fits(spec: AttackSpec, like: AttackSpec) -> bool:
    """Whether an attack is about what another one is about; nothing is known of what data a user's own module reconstructs."""
    if spec.tells_members or like.tells_members:
        return spec.tells_members == like.tells_members
    own, others = (modalities_of(str(of.table["use"])) for of in (spec, like))
    return not own or not others or any(modality in others for modality in own)


def _defended(cell: Setting, link: Table) -> Setting:
    settings = {k: v for k, v in link.items() if k != "name"}
    return replace(cell, name=f"{cell.name}, {_called(link)}", chain=(settings, *cell.chain))
