"""`pagedkv NAME ...`: the own command of an installed backend, `Descriptor.tool`, for whatever that backend needs."""

from __future__ import annotations

from typing import Any

import click

from pagedkv.api.errors import PagedKVError
from pagedkv.plugins import Found, discover, load
from pagedkv.plugins.loading import blamed, refusal

PASSES = (PagedKVError, SystemExit, click.ClickException, click.exceptions.Exit, click.Abort)
"""What a backend's command may raise on purpose: our errors, and the ways in which command line libraries end."""


class OwnCommand(click.Command):
    """Gives every argument to the backend, --help included."""

    def __init__(self, found: Found) -> None:
        super().__init__(found.name, help=f"The own command of {found}.")
        self._found = found

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read none of them here."""
        ctx.args = list(args)
        return ctx.args

    def invoke(self, ctx: click.Context) -> Any:
        """Load the backend and run its command; what it returns is the exit code."""
        descriptor = load(self._found)
        with blamed(self._found, "running its own command", passes=PASSES):
            code = descriptor.tool(ctx.args)
        if type(code) is not int:
            raise refusal(self._found, f"its own command returned {code!r}, must return an exit code")
        ctx.exit(code)


def own_command(name: str) -> OwnCommand | None:
    """The command of the backend of this name, upper and lower case alike; None where no distribution offers it."""
    return next((OwnCommand(found) for found in discover() if found.name.lower() == name.lower()), None)
