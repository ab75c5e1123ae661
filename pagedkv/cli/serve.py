"""`pagedkv serve`: a model behind the OpenAI API."""

from __future__ import annotations

import difflib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from pagedkv.api.errors import ConfigError
from pagedkv.cli.common import model_argument
from pagedkv.cli.model_options import engine_options, engine_settings
from pagedkv.config import known_names, parse_bytes

_log = logging.getLogger("pagedkv.cli")
_COUNT: Mapping[str, Any] = {"type": int, "metavar": "N"}
_SECONDS: Mapping[str, Any] = {"type": float, "metavar": "SECONDS"}
_SEVERAL: Mapping[str, Any] = {"multiple": True}

SERVER: Mapping[str, Mapping[str, Any]] = {
    "host": {"help": "Address to listen on.", "metavar": "ADDRESS", "default": "127.0.0.1"},
    "port": {"help": "Port to listen on; 0 takes a free one.", **_COUNT, "default": 8000},
    "api_key": {"help": "A key that clients must bring; may be repeated.", "metavar": "KEY", **_SEVERAL},
    "api_key_file": {"help": "Named keys, as lines that `pagedkv api-key` makes.", "metavar": "FILE"},
    "served_model_name": {"help": "Name that clients give; may be repeated. Default: MODEL.", "metavar": "NAME"}
    | dict(_SEVERAL),
    "allowed_host": {"help": "A further Host header to accept; may be repeated.", "metavar": "NAME", **_SEVERAL},
    "allowed_origin": {"help": "Web origin whose pages may ask; may be repeated.", "metavar": "ORIGIN", **_SEVERAL},
    "root_path": {"help": "Path under which a proxy shows this server.", "metavar": "PATH", "default": ""},
    "ssl_certfile": {"help": "Certificate, to serve https.", "metavar": "FILE"},
    "ssl_keyfile": {"help": "Its private key.", "metavar": "FILE"},
    "chat_template": {"help": "A Jinja template in place of the model's.", "metavar": "FILE"},
    "tool_call_parser": {"help": "Who reads calls of tools: hermes or llama3_json.", "metavar": "NAME"},
    "max_queue": {"help": "Answers that may wait beside those that run; more get 429.", **_COUNT, "default": 1024},
    "max_choices": {"help": "Answers of one request, prompts times n, at most.", **_COUNT, "default": 128},
    "max_body_size": {"help": 'Size of a body, such as "32MiB"; more get 413.', "metavar": "SIZE", "default": "32MiB"},
    "request_timeout": {"help": "Time for one request; 0 is no limit.", **_SECONDS, "default": 1800.0},
    "drain_timeout": {"help": "Time for open requests after a signal to stop.", **_SECONDS, "default": 30.0},
    "watchdog_timeout": {
        "help": "Time without a sign of life after which the engine is given up; 0 is no limit.",
        **_SECONDS,
        "default": 300.0,
    },
    "restart_engine": {"help": "How often a lost engine is started again.", **_COUNT, "default": 0},
    "ready_timeout": {"help": "Time for the one token of GET /ready.", **_SECONDS, "default": 5.0},
    "exit_delay": {
        "help": "How long a server whose engine is gone says so before it ends with code 1.",
        **_SECONDS,
        "default": 5.0,
    },
    "log_requests": {"help": "Log one line a request, without its words.", "is_flag": True},
    "log_prompts": {"help": "Log the words of requests too.", "is_flag": True},
}
"""Setting of the server -> how its flag reads it, in the order of the help text."""

WITHOUT_EFFECT = {
    "enable_auto_tool_choice": "--tool-call-parser alone does it",
    "disable_log_requests": "requests are logged with --log-requests only",
    "disable_log_stats": "GET /metrics has the statistics, and nothing logs them",
    "disable_fastapi_docs": "there are no such pages",
}
"""Names that people bring with them and that need nothing, and why."""


class Serve(click.Command):
    """Takes options that only the engine or a backend knows, as articles give them, beside its own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set aside what is no option of the command; the engine takes it, or says what is wrong with it."""
        known, extra = split_unknown(args, self._flags())
        ctx.meta["extra"] = extra
        return super().parse_args(ctx, known)

    def _flags(self) -> dict[str, bool]:
        flags = {"--help": True, "-h": True}
        for parameter in self.params:
            if isinstance(parameter, click.Option):
                alone = parameter.is_flag or parameter.count
                flags |= dict.fromkeys((*parameter.opts, *parameter.secondary_opts), bool(alone))
        return flags


def split_unknown(args: Sequence[str], flags: Mapping[str, bool]) -> tuple[list[str], dict[str, Any]]:
    """Arguments for the command, and unknown options by name; `flags` says of a known one whether it stands alone.

    An unknown one has a value behind =, or in the next argument if a model has been named before; else it is a switch.
    """
    known: list[str] = []
    extra: dict[str, Any] = {}
    rest, named = list(args), False
    while rest:
        arg = rest.pop(0)
        flag, equals, value = arg.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if not arg.startswith("--") or flag in flags:
            known.append(arg)
            named = named or not arg.startswith("-") or flag == "--model"
            if arg.startswith("-") and not equals and not flags.get(flag, True) and rest:
                known.append(rest.pop(0))
            continue
        if not equals:
            value = rest.pop(0) if named and rest and not rest[0].startswith("--") else "true"
        extra[flag[2:].replace("-", "_")] = _value(value)
    return known, extra


def _value(text: str) -> Any:
    """A switch, a number, or text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for name in reversed(list(SERVER)):
        option = click.option(
            f"--{name.replace('_', '-')}", name, show_default="default" in SERVER[name], **SERVER[name]
        )
        command = option(command)
    return command


@click.command("serve", cls=Serve)
@model_argument
@_server_options
@engine_options
@click.pass_context
def serve(ctx: click.Context, /, model: str, settings: dict[str, Any], **server: Any) -> None:
    """Serve MODEL (a folder, a .gguf file, a hub id, or demo) through the OpenAI API.

    \b
    pagedkv serve demo
    pagedkv serve ./Qwen3-0.6B --port 9000 --served-model-name qwen --tool-call-parser hermes
    pagedkv serve ./model --host 0.0.0.0 --api-key-file keys.txt --restart-engine 3
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "The capital of France is", "max_tokens": 8}'

    SIGTERM or Ctrl-C takes no new request, lets open ones end and stops; a second one stops at once. An option of a
    backend may be given by its own name too.
    """
    from pagedkv.server.run import serve as run

    config = server_config(server)
    extra = _without_effect(ctx.meta["extra"])
    check_typos(extra)
    level = logging.getLevelName(logging.getLogger("pagedkv").level)
    sys.exit(run({"model": model, **engine_settings(settings), **extra}, config, level=level))


def check_typos(extra: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a name that is nearly one of the server's own.

    The engine, which is asked about every other one, knows those of its own and its backend's only.
    """
    for name in extra:
        near = difflib.get_close_matches(name, SERVER, n=1, cutoff=0.7)
        if near and name not in known_names():
            flags = [each.replace("_", "-") for each in (name, near[0])]
            raise ConfigError(f"there is no option --{flags[0]}: did you mean --{flags[1]}?")


def server_config(given: Mapping[str, Any]) -> Any:
    """The `ServerConfig` of these options. Raises `ConfigError`."""
    from pagedkv.server.settings import ServerConfig

    named = dict(given)
    for one, many in (
        ("api_key", "api_keys"),
        ("served_model_name", "served_model_names"),
        ("allowed_host", "allowed_hosts"),
        ("allowed_origin", "allowed_origins"),
    ):
        named[many] = tuple(named.pop(one))
    for name in ("request_timeout", "watchdog_timeout"):
        named[name] = named[name] or None
    named["max_body_size"] = parse_bytes(named["max_body_size"], "max_body_size")
    if named["chat_template"] is not None:
        named["chat_template"] = _read_template(named["chat_template"])
    return ServerConfig(**named)


def _read_template(name: str) -> str:
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {name} cannot be read: {error}") from error


def _without_effect(extra: Mapping[str, Any]) -> dict[str, Any]:
    for name in extra:
        if name in WITHOUT_EFFECT:
            _log.info("--%s has no effect: %s", name.replace("_", "-"), WITHOUT_EFFECT[name])
    return {name: value for name, value in extra.items() if name not in WITHOUT_EFFECT}
