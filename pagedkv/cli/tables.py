"""Tables for people, on standard output; nothing in a cell is ever cut."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 240


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Cells wrap where the terminal ends; into a pipe, lines are long instead."""
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        # Text: a plugin's "[bracket]" is no markup.
        table.add_row(*(Text(cell) for cell in row))
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    with console.capture() as text:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in text.get().splitlines()))
