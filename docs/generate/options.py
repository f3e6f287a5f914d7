"""The tables of docs/reference/command-options.md: every option of every command, with its default and meaning."""

import argparse

from docs.generate.markdown import escaped
from fedgauge.simulations.cli.main import GROUPS, command_parser

HEADER = "| option | meaning |\n|---|---|\n"
EVERYWHERE = ("-h", "--runs", "--allow")  # the page explains them once


def section(name: str, parser: argparse.ArgumentParser, summary: str) -> str:
    """A command's heading, what it does, and a table of its options; those of its actions below."""
    rows, below = [], ""
    for action in parser._actions:  # argparse has no public list
        if isinstance(action, argparse._SubParsersAction):
            summaries = {choice.dest: choice.help or "" for choice in action._choices_actions}
            below = "".join(section(f"{name} {k}", inner, summaries[k]) for k, inner in action.choices.items())
        elif not set(EVERYWHERE) & set(action.option_strings):
            rows.append(_row(action))
    table = f"{HEADER}{''.join(rows)}\n" if rows else ""
    said = summary if summary.endswith(".") else f"{summary}."
    return f"### fedgauge {name}\n\n{escaped(said[0].upper() + said[1:])}\n\n{table}{below}"


def _row(action: argparse.Action) -> str:
    choices = "|".join(map(str, action.choices or ()))
    value = action.metavar or choices or action.dest.upper()
    words = " ".join(filter(None, (", ".join(action.option_strings), str(value) if action.nargs != 0 else "")))
    needed = " Needed." if action.required and action.option_strings else ""
    return (
        f"| {escaped(f'`{words}`')} | {escaped(' '.join((action.help or '').replace('%%', '%').split()))}{needed} |\n"
    )


def block(module: str) -> str:
    """Return the sections of a group's commands."""
    return "\n" + "".join(section(name, command_parser(name), said) for name, said in GROUPS[module].items())
