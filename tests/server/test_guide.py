"""docs/server.md is held to the command, the routes, the fields and the errors that there are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import cast

import pytest
from click.testing import CliRunner
from fastapi.routing import APIRoute
from starlette.routing import Route

from pagedkv.cli.api_key import api_key
from pagedkv.cli.main import pagedkv
from pagedkv.cli.serve import SERVER, serve, server_config
from pagedkv.environment import ENVIRONMENT
from pagedkv.sampling.params import SamplingParams
from pagedkv.server.app import create_app, router
from pagedkv.server.bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, Generating, TokenizeBody
from pagedkv.server.front import Front
from pagedkv.server.metrics import CODES
from pagedkv.server.settings import ServerConfig
from pagedkv.server.tool_parsers import get_parser

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "server.md").read_text("utf-8")
PROSE = re.sub(r"^```.*?^```", "", GUIDE, flags=re.S | re.M)


def flags(command: str) -> set[str]:
    """Those that the command's help shows."""
    result = CliRunner().invoke(pagedkv, [command, "--help"])
    assert result.exit_code == 0
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", result.output))


def section(title: str) -> str:
    """From a heading to the next of its level or above."""
    level = GUIDE[GUIDE.index(f"# {title}\n") - 4 : GUIDE.index(f"# {title}\n") + 1].split("\n")[-1].count("#")
    rest = GUIDE[GUIDE.index(f"# {title}\n") :]
    end = re.search(rf"^#{{1,{level}}} ", rest[1:], re.M)
    return rest[: end.start()] if end else rest


def code(text: str) -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", text))


def test_every_flag_is_one_of_the_command_and_every_flag_of_the_server_is_told() -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", GUIDE))
    assert named <= flags("serve") | flags("api-key")
    assert {f"--{name.replace('_', '-')}" for name in SERVER} <= named


def test_defaults_are_those_of_the_command_and_of_the_settings() -> None:
    rows = re.findall(r"^\| `--([a-z-]+)` \| (\w+) \|", GUIDE, re.M)
    assert len(rows) == 9
    command = server_config(
        {name: one.get("default", () if "multiple" in one else None) for name, one in SERVER.items()}
    )
    for name, default in rows:
        assert str(SERVER[name.replace("-", "_")]["default"]).removesuffix(".0") == default
        assert getattr(command, name.replace("-", "_")) == getattr(ServerConfig(), name.replace("-", "_"))


def api() -> list[APIRoute]:
    return [route for route in router.routes if isinstance(route, APIRoute)]


def test_the_endpoints_are_the_apps_routes() -> None:
    told = re.findall(r"^\| (GET|POST) \| `(/[^`]*)` \|", GUIDE, re.M)
    routes = [route for route in create_app(cast(Front, None)).routes if isinstance(route, Route)]
    served = {
        (method, route.path.replace(":path", "")) for route in [*routes, *api()] for method in route.methods or ()
    }
    assert set(told) == served - {("HEAD", "/openapi.json")}
    assert len(told) == len(set(told))


def test_paths_that_are_named_are_served_or_said_not_to_be() -> None:
    named = {one.removeprefix("GET ") for one in code(PROSE) if re.fullmatch(r"(GET )?/[a-z]\S*", one)}
    told = set(re.findall(r"^\| (?:GET|POST) \| `(/[^`]*)` \|", GUIDE, re.M))
    missing = code(section("What it does not do"))
    assert named - told == {one for one in missing if one.startswith("/")} != set()


def test_the_other_endpoints_fields_are_those_of_their_bodies() -> None:
    for path, body in (("/v1/embeddings", EmbeddingBody), ("/tokenize", TokenizeBody), ("/detokenize", DetokenizeBody)):
        row = next(line for line in section("Endpoints").splitlines() if f"`{path}`" in line)
        fields = code(row) - {path, "count", "max_model_len"}
        told = {*code(section("What a request may say")), "model", "user"}
        assert fields <= set(body.model_fields) <= fields | told


def test_every_field_is_one_of_the_bodies() -> None:
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields}
    text = section("What a request may say")
    text = text[: text.index("Types are strict")]
    named = {one for one in code(text) if re.fullmatch(r"[a-z_]+", one)} - {"extra_body"}
    assert named <= fields
    assert fields - named == {"model", "user", "request_id"}


def test_what_is_refused_and_what_does_nothing() -> None:
    text = section("What a request may say")
    refused = text[text.index("**One that is known") : text.index("`metadata`")]
    assert code(refused) == {*ChatBody.unsupported, *CompletionBody.unsupported}
    idle = text[text.index("`metadata`") : text.index("### Streams")]
    assert code(idle) == Generating.without_effect


def test_fields_as_in_sampling_params_are_there() -> None:
    row = re.search(r"^\| (.*) \| as in `SamplingParams` \|$", GUIDE, re.M)
    assert row is not None and code(row[1]) <= set(SamplingParams.__dataclass_fields__)


def test_the_errors_are_those_that_there_are() -> None:
    rows = re.findall(r"^\| (\d{3}) \| (.*?) \|", GUIDE, re.M)
    assert {one for _, cell in rows for one in code(cell)} == set(CODES)
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "pagedkv" / "server").glob("*.py"))
    assert set(re.findall(r'code="(\w+)"', sources)) <= set(CODES), "metrics.CODES has all of them"
    assert {status for status, _ in rows} <= set(re.findall(r"\b[45]\d\d\b", sources))


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", GUIDE)
    assert len(targets) >= 4 and all((ROOT / "docs" / target).is_file() for target in targets)


def test_variables_and_parsers_are_known() -> None:
    assert set(re.findall(r"PAGEDKV_\w+", GUIDE)) <= set(ENVIRONMENT)
    named = re.findall(r"`--tool-call-parser (\w+)` or `(\w+)`", GUIDE)
    assert len(named) == 1 and all(get_parser(name) for name in named[0])


def commands() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE, re.S | re.M)
    inline = sorted(one for one in code(PROSE) if one.startswith(("pagedkv ", "python -m pagedkv")))
    return [line for block in blocks for line in block.splitlines() if line.startswith("pagedkv")] + inline


@pytest.mark.parametrize("line", commands())
def test_commands_are_understood(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "python":
        assert words[:3] == ["python", "-m", "pagedkv.entrypoints.api_server"]
        words = ["pagedkv", "serve", *words[3:]]
    command = {"serve": serve, "api-key": api_key}[words[1]]
    if "--help" not in words:
        context = command.make_context(words[1], words[2:])
        assert context.params and not context.meta.get("extra")


def test_the_python_of_the_guide_compiles() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE, re.S | re.M)
    assert len(blocks) == 1 and all(compile(block, "server.md", "exec") for block in blocks)
