"""`pagedkv jetson tune [--apply]`: what makes this board fastest as commands, or carried out, and how to undo it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

import click

from pagedkv.api.errors import BackendUnavailable, ConfigError
from pagedkv_jetson.board import identify
from pagedkv_jetson.power import commands, power

AGAIN = "modes outlast a restart, clocks do not: run it again after one"


def group(root: Path) -> click.Group:
    """The backend's own command, over the files under `root`."""

    @click.group(context_settings={"help_option_names": ["-h", "--help"]})
    def jetson() -> None:
        """What only a Jetson board needs."""

    @jetson.command()
    @click.option("--apply", is_flag=True, help="Run the commands, as root, instead of printing them.")
    def tune(apply: bool) -> None:
        """Print the way to this board's fastest mode, and back.

        \b
        pagedkv jetson tune
        sudo pagedkv jetson tune --apply
        """
        _tune(root, apply)

    return jetson


def _tune(root: Path, apply: bool) -> None:
    found = power(root)
    if identify(root) is None:
        raise BackendUnavailable("this machine is not a Jetson: there is nothing to tune")
    if not found.known:
        raise BackendUnavailable(
            "/etc/nvpmodel.conf and /var/lib/nvpmodel/status do not tell the power mode, and an id means another mode "
            "on another board: run this on the board itself, not in a container; `sudo nvpmodel -q` shows the mode"
        )
    do, undo = commands(found)
    click.echo(f"power mode {found.spell(found.current)}, fastest {found.spell(found.fastest)}")
    if not do:
        click.echo("nothing to do: the mode is the fastest, and the clocks stay at their highest")
        return
    if apply and os.geteuid() != 0:
        raise ConfigError("only root may change mode and clocks: sudo pagedkv jetson tune --apply")
    click.echo(f"{_lines(do)}\nto undo it:\n{_lines(undo)}\n{AGAIN}")
    for command in do if apply else ():
        _run(command)


def _lines(commands: Iterable[str]) -> str:
    return "\n".join(f"  sudo {command}" for command in commands)


def _run(command: str) -> None:
    click.echo(f"running {command}; answer what it asks")
    try:
        subprocess.run(command.split(), check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise BackendUnavailable(
            f"{error}: nothing after it was run; if this is a container, run it outside"
        ) from error
