"""`pagedkv api-key`: make a key for the server."""

from __future__ import annotations

import logging
from pathlib import Path

import click

from pagedkv.server.keys import append_key, key_line, new_key

_log = logging.getLogger("pagedkv.cli")


@click.command("api-key")
@click.argument("name", metavar="NAME")
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Add the key's line to this file, which is made if it is not there.",
)
def api_key(name: str, file: Path | None) -> None:
    """Make an API key for NAME and print it, this once.

    The server gets a line with the key's digest alone, in the file that `pagedkv serve --api-key-file FILE` reads.
    Without --file that line is printed below the key. A server that runs reads its file again on SIGHUP; deleting the
    line takes the key back.

    \b
    pagedkv api-key alice --file keys
    KEY=$(pagedkv api-key -q ci --file keys)
    """
    key = new_key()
    line = key_line(name, key)
    if file is not None:
        append_key(file, name, key)
        _log.info("%s has its digest; the key itself is shown this once", file)
    click.echo(key)
    if file is None:
        click.echo(line, nl=False)
