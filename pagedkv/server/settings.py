"""What a server may be told about itself, beside the settings of its engine; checked once."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from pagedkv.api.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How a server listens, whom it lets in, and where it stops. Times are in seconds, None is no limit.

    `max_queue` answers may wait beside those that run; `max_choices` is the most that one request may ask for, its
    prompts times n. `watchdog_timeout`: an engine without a word between two steps for so long is given up, and started
    again `restart_engine` times in all. `drain_timeout`: how long requests go on after the signal to stop.
    `ready_timeout`: how long the one token of a readiness probe may take. `exit_delay`: how long a server without an
    engine still answers that it has none, before it ends with exit code 1.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    served_model_names: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    max_queue: int = 1024
    max_choices: int = 128
    max_body_size: int = 32 * 1024**2
    request_timeout: float | None = 1800.0
    drain_timeout: float = 30.0
    watchdog_timeout: float | None = 300.0
    restart_engine: int = 0
    ready_timeout: float = 5.0
    exit_delay: float = 5.0
    log_requests: bool = False
    log_prompts: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name}={value!r} must be at least {least}"
            for name, least in (("port", 0), ("max_queue", 0), ("max_choices", 1), ("max_body_size", 1))
            if (value := getattr(self, name)) < least
        ]
        problems += [
            f"{name}={value!r} must be at least 0 seconds"
            for name in ("drain_timeout", "exit_delay", "ready_timeout")
            if (value := getattr(self, name)) < 0
        ]
        problems += [
            f"{name}={value!r} must be above 0 seconds, or 0 on the command line for no limit"
            for name in ("request_timeout", "watchdog_timeout")
            if (value := getattr(self, name)) is not None and value <= 0
        ]
        if self.port > 65535:
            problems.append(f"port={self.port} must be at most 65535")
        if self.restart_engine < 0:
            problems.append(f"restart_engine={self.restart_engine} must be at least 0")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            problems.append("ssl_certfile and ssl_keyfile belong together: give both")
        if problems:
            raise ConfigError("; ".join(problems))

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False
