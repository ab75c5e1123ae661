"""The `pagedkv` command: a group whose commands are imported when they run, so that help and version stay fast."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import click

from pagedkv import __version__
from pagedkv.cli.common import CONTEXT, logging_options, reported
from pagedkv.environment import check_environment
from pagedkv.logs import start_command_logging, stop_command_logging

COMMANDS = {
    "generate": ("pagedkv.cli.generate", "Answer one or more prompts."),
    "chat": ("pagedkv.cli.chat", "Talk with a model in the terminal."),
    "serve": ("pagedkv.cli.serve", "Serve a model through the OpenAI API."),
    "eval": ("pagedkv.cli.eval", "Measure a model's perplexity on a text."),
    "bench": ("pagedkv.cli.bench", "Measure throughput, latency and memory against batch size."),
    "plan": ("pagedkv.cli.plan", "Say what a model needs, what fits, and how fast it would be."),
    "api-key": ("pagedkv.cli.api_key", "Make an API key and the line for the file of keys."),
    "backends": ("pagedkv.cli.backends", "List the installed backends, their devices, and every reason for a no."),
    "certify": ("pagedkv.cli.certify", "Test an installed backend against every law of the contract."),
    "doctor": ("pagedkv.cli.doctor", "Show what is here, what would be chosen, and what mends each trouble."),
}
"""Command -> the module that has it under the same name (- as _), and its line in the help text."""
OWN = ("BACKEND ...", "The own command of an installed backend, where it has one.")
"""The last line there: which backends have one is known to them alone."""


class LazyGroup(click.Group):
    """Knows its commands by name; a module is imported when its command is asked for."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Set logging up before any option is read: `--quiet` and its like change it."""
        with reported():
            start_command_logging()
        try:
            context = super().make_context(*args, **kwargs)
        except BaseException:  # --help and --version leave this way too
            stop_command_logging()
            raise
        context.call_on_close(stop_command_logging)
        return context

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands that are built, in the order of `COMMANDS`."""
        return [name for name, (module, _) in COMMANDS.items() if importlib.util.find_spec(module) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, with the options that all share, or a backend's own; None when there is none of that name."""
        if cmd_name not in self.list_commands(ctx):
            from pagedkv.cli.own import own_command

            return own_command(cmd_name)
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name.replace("-", "_"))
        taken = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        command.params.extend(option for option in logging_options() if taken.isdisjoint(option.opts))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in the help text, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([*((name, COMMANDS[name][1]) for name in self.list_commands(ctx)), OWN])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; our errors end as one message on standard error."""
        with reported():
            return super().invoke(ctx)


@click.group(cls=LazyGroup, context_settings=CONTEXT, params=logging_options())
@click.version_option(__version__, "-V", "--version", prog_name="pagedkv", message="%(prog)s %(version)s")
def pagedkv() -> None:
    """Run language models with a paged KV cache on whatever hardware is there.

    \b
    pagedkv generate demo --prompt "Explain photosynthesis in one sentence." --chat
    pagedkv backends
    pagedkv doctor --json

    Results go to standard output, logs and progress to standard error. PAGEDKV_BACKEND chooses a backend,
    PAGEDKV_LOG_LEVEL how much is logged. COMMAND --help shows examples for each command.
    """
    check_environment()


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `pagedkv` script."""
    pagedkv.main(args=arguments, prog_name="pagedkv")


if __name__ == "__main__":
    main()
