"""`pagedkv serve`: command lines as articles give them, what is wrong with one, and what a start says."""

from __future__ import annotations

import multiprocessing
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from pagedkv.cli import main as cli
from pagedkv.cli.serve import SERVER, WITHOUT_EFFECT, serve, split_unknown
from pagedkv.server.settings import ServerConfig
from tests.helpers.engine_rig import folder

FLAGS = {"--model": False, "--port": False, "--api-key": False, "--block-size": False, "--quiet": True, "-q": True}


@pytest.mark.parametrize(
    ("line", "known", "extra"),
    [
        ("demo", "demo", {}),
        ("demo --port 9", "demo --port 9", {}),
        ("demo --use-x", "demo", {"use_x": True}),
        ("demo --use-x --port 9", "demo --port 9", {"use_x": True}),
        ("demo --n-x 4 --port 9", "demo --port 9", {"n_x": 4}),
        ("demo --share 0.5 --name abc", "demo", {"share": 0.5, "name": "abc"}),
        ("demo --name=abc --use-x=false --n=3", "demo", {"name": "abc", "use_x": False, "n": 3}),
        ("--use-x demo", "demo", {"use_x": True}),  # before the model, what follows may be the model
        ("--model demo --use-x yes", "--model demo", {"use_x": "yes"}),
        ("--model=demo --n-x 4", "--model=demo", {"n_x": 4}),
        ("-q demo --use-x", "-q demo", {"use_x": True}),
        ("demo --block_size 32", "demo --block_size 32", {}),
        ("demo --api-key --use-x", "demo --api-key --use-x", {}),  # a key may look like anything
        ("demo --use-x -1", "demo", {"use_x": -1}),
        ("demo --quiet --use-x", "demo --quiet", {"use_x": True}),
    ],
)
def test_what_is_no_option_of_the_command_is_set_aside(line: str, known: str, extra: dict[str, Any]) -> None:
    assert split_unknown(line.split(), FLAGS) == (known.split(), extra)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], ServerConfig]]:
    """What the command would serve, without serving it."""
    calls: list[tuple[dict[str, Any], ServerConfig]] = []

    def take(settings: dict[str, Any], config: ServerConfig, *, level: str) -> int:
        calls.append((settings, config))
        return 0

    monkeypatch.setattr("pagedkv.server.run.serve", take)
    return calls


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.pagedkv, ["serve", *arguments])


def test_an_articles_command_line_reaches_the_engine(served: list[Any]) -> None:
    line = "--model M --block-size 32 --use-ascend-memory-pool --worker-use-ray --max-context-len-to-capture 8192"
    assert run(*line.split(), "--tensor-parallel-size", "2", "--trust-remote-code").exit_code == 0
    ((settings, _),) = served
    assert settings == {
        "model": "M",
        "block_size": 32,
        "use_ascend_memory_pool": True,
        "worker_use_ray": True,
        "max_context_len_to_capture": 8192,
        "tensor_parallel_size": 2,
        "trust_remote_code": True,
    }


def test_options_of_the_server_in_their_units(served: list[Any]) -> None:
    line = "demo --port 0 --served-model-name a --served-model-name b --max-body-size 2MiB --request-timeout 0"
    assert run(*line.split(), "--api-key", "sk-0123456789", "--watchdog-timeout", "7").exit_code == 0
    ((_, config),) = served
    assert config == ServerConfig(
        port=0,
        served_model_names=("a", "b"),
        max_body_size=2 * 1024**2,
        request_timeout=None,
        watchdog_timeout=7.0,
        api_keys=("sk-0123456789",),
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("demo --prot 9000", "there is no option --prot: did you mean --port?"),
        ("demo --max-quue 5", "there is no option --max-quue: did you mean --max-queue?"),
        ("demo --served-model-nam x", "did you mean --served-model-name?"),
        ("demo --port 99999", "port=99999 must be at most 65535"),
        ("demo --port x", "Invalid value for '--port'"),
        ("demo --ssl-certfile c.pem", "give both"),
        ("demo --chat-template nosuch.jinja", "--chat-template nosuch.jinja cannot be read"),
        ("demo --max-body-size huge", "max_body_size"),
        ("demo --tool-call-parser mistral", "choose one of hermes, llama3_json"),
        ("--port 0", "no model is given"),
    ],
)
def test_a_wrong_command_line_is_one_message_and_no_start(
    line: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.server.run.bind", lambda config: pytest.fail("it began to listen"))
    result = run(*line.split())
    assert result.exit_code == 2 and says in result.output


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_name_that_needs_nothing_is_said_and_dropped(name: str, served: list[Any]) -> None:
    result = run("demo", f"--{name.replace('_', '-')}")
    assert WITHOUT_EFFECT[name] in result.output and served[0][0] == {"model": "demo"}


def test_help_shows_every_option_and_examples() -> None:
    text = run("--help").output
    options = [option for each in serve.params if isinstance(each, click.Option) for option in each.opts]
    assert len(options) > len(SERVER) and all(option in text for option in options)
    assert "pagedkv serve demo" in text and "curl localhost:8000/v1/completions" in text


def test_a_taken_port_is_said_before_a_model_is_loaded() -> None:
    before = multiprocessing.active_children()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("nosuch", "--port", str(port))
    assert result.exit_code == 2
    (line,) = [line for line in result.output.splitlines() if line.startswith("error")]
    assert line.startswith(f"error: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another")
    assert multiprocessing.active_children() == before


def test_a_model_that_is_not_there_is_one_message() -> None:
    before = multiprocessing.active_children()
    result = run("nosuch", "--port", "0")
    assert result.exit_code == 1
    assert [line for line in result.output.splitlines() if "nosuch" in line] == [
        "error: 'nosuch' is neither a folder nor a file here, nor a hub id like 'org/name'. Check the path, or try "
        "'demo'."
    ]
    deadline = time.monotonic() + 10  # its process is ended by a thread
    while len(multiprocessing.active_children()) > len(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(multiprocessing.active_children()) == len(before)


def test_the_front_imports_no_torch() -> None:
    script = (
        "import sys\nimport pagedkv.cli.serve, pagedkv.server.run, pagedkv.entrypoints.api_server\n"
        "print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.fixture
def started() -> Iterator[Callable[..., list[str]]]:
    """Start a server by a command line, and give its log up to the address."""
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> list[str]:
        process = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE, text=True)
        processes.append(process)
        lines: list[str] = []
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line.rstrip("\n"))
            if " on http://" in line:
                return lines
        raise AssertionError(lines)

    yield start
    for process in processes:
        process.terminate()
        assert process.wait(30) == 0
        assert process.stderr is not None
        process.stderr.close()


def test_a_start_says_model_backend_memory_features_and_address(started: Callable[..., list[str]]) -> None:
    model = str(folder())
    settings = "--backend-option threads=1 --num-blocks 65 --block-size 4 --port 0 --served-model-name tiny"
    lines = started("-m", "pagedkv.cli.main", "serve", model, "--backend", "cpu", *settings.split())
    text = "\n".join(lines)
    for said in ("backend cpu on device 0", "memory budget", "65 blocks", "prefix caching on", "block size 4"):
        assert said in text
    assert re.fullmatch(rf"serving tiny \({re.escape(model)}\) on http://127\.0\.0\.1:\d+/v1", lines[-1])
