"""`fedgauge reproduce` and `compare`: published tables, the suite and the challenge."""

import argparse

from fedgauge.simulations.cli.options import Commands, add_jobs, path, positive, refuse, result_file, several

SUITE = "suite"


def add_to(commands: Commands) -> None:
    table = commands.add(reproduce, with_run=False)
    add_jobs(table, 1)
    table.add_argument("name", metavar="NAME", help="a published table, suite, or your own file: NAME.toml")
    table.add_argument("--level", choices=("small", "full"), help="of the suite (default: small)")
    text = "also attack every chosen cell with this, on the cell's terms (repeatable)"
    several(table, "--attack", "'NAME KEY=VALUE ...'", text)
    table.add_argument(
        "--n", type=positive, metavar="N", help="updates attacked in each setting, instead of the table's"
    )
    table.add_argument(
        "--budget", type=positive, metavar="N", help="iterations of every attack, instead of the table's"
    )
    for option, of in (("--cells", "settings"), ("--attacks", "attacks")):
        table.add_argument(option, metavar="PATTERN", help=f"only these {of}: part of their name, or with * and ?")
    path(table, "--output -o", "FILE", "keep the figures too, and continue what it holds", type=result_file)
    text = "what fedgauge reproduce --output wrote; or suite_small: the figures that fedgauge keeps of it"
    path(commands.add(compare, with_run=False), "files", "FILE", text, nargs="+")


def reproduce(options: argparse.Namespace) -> int:
    from fedgauge.simulations.reproduction.paper_table_files import load, restrict, submitted, with_submissions
    from fedgauge.simulations.reproduction.reproduce import reproduce_table

    refuse({f"--level is only for fedgauge reproduce {SUITE}": options.level is not None and options.name != SUITE})
    name = f"{SUITE}_{options.level or 'small'}" if options.name == SUITE else options.name
    chosen = restrict(load(name), options.n, options.budget, options.cells)
    paper_table = with_submissions(chosen, options.attack)
    if options.attacks is not None:
        always = [submitted(text)[0] for text in options.attack]
        paper_table = restrict(paper_table, None, None, "*", options.attacks, always)
    reproduce_table(paper_table, options.output, options.jobs)
    return 0


def compare(options: argparse.Namespace) -> int:
    from fedgauge.simulations.experiments.results import print_table
    from fedgauge.simulations.reproduction.figures import compared, read_figures

    print_table(compared({str(file): read_figures(file) for file in options.files}))
    return 0
