"""Whatever requests schemathesis makes of /openapi.json, answers are what it says of them, and none is a failure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.helpers.api_rig import NAME, Api

CHECKS: Any = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"]


@pytest.fixture(scope="module")
def schema(api: Api) -> Any:
    return schemathesis.openapi.from_url(f"{api.url}/openapi.json")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_answers_are_as_they_are_described(schema: Any, path: str, mode: GenerationMode) -> None:
    statuses: Counter[int] = Counter()
    checks = CHECKS + [negative_data_rejection] * (mode is GenerationMode.NEGATIVE)

    @seed(10)
    @settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(schema[path]["POST"].as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            case.body["model"] = NAME
        response = case.call(timeout=30)
        case.validate_response(response, checks=checks)
        statuses[response.status_code] += 1

    ask()
    assert statuses.total() >= 20 and set(statuses) <= {200, 400, 404, 415}
    if mode is GenerationMode.POSITIVE and path in ("/v1/completions", "/tokenize", "/detokenize"):
        assert statuses[200]


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True, "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": [97], "stream": True, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"<<{CALL}>>"}], "tools": TOOLS}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True, "max_tokens": 2}),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}),
    ],
)
def test_answers_of_many_parts_are_as_they_are_described(schema: Any, path: str, body: Any) -> None:
    case = schema[path]["POST"].Case(body=body, media_type="application/json")
    response = case.call(timeout=30)
    case.validate_response(response, checks=CHECKS)
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}", "/health", "/ready", "/version", "/metrics"])
def test_what_is_read_is_as_it_is_described(schema: Any, path: str) -> None:
    (operation,) = [each for each in schema[path].values() if each.method.upper() == "GET"]
    case = operation.Case(path_parameters={"name": "tiny"} if "{" in path else {})
    response = case.call(timeout=30)
    case.validate_response(response, checks=CHECKS)
    assert response.status_code == 200


def test_every_route_has_its_answers_described(schema: Any) -> None:
    described = schema.raw_schema["paths"]
    assert set(PATHS) < set(described)
    for path, methods in described.items():
        for method, operation in methods.items():
            assert set(operation["responses"]) == {"200", "default"}, (method, path)
            error = operation["responses"]["default"]["content"]["application/json"]["schema"]
            assert error == {"$ref": "#/components/schemas/ErrorAnswer"}
            if method == "post":
                body = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                assert schema.raw_schema["components"]["schemas"][body]["examples"]
