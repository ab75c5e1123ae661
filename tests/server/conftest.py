"""One server for all tests of the API in a process."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.helpers.api_rig import Api


@pytest.fixture(scope="session")
def api() -> Iterator[Api]:
    made = Api(tool_call_parser="hermes")
    yield made
    made.close()


@pytest.fixture(scope="session")
def client(api: Api) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
