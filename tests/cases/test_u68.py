"""U68: metrics that are empty, multiplied over processes, or wrong about the cache.

vLLM #8612, #20302, PR #28792: all series exist from the start, gauges have one owner, token sums match `usage`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.api_rig import NAME, Api

PREFIX = "the same words stand before each of these prompts, "


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    made = Api()
    yield made
    made.close()


def scrape(api: Api) -> dict[str, float]:
    """Every series of ours, labels but the model's name behind its name; none twice."""
    text = httpx.get(f"{api.url}/metrics").raise_for_status().text
    found: dict[str, float] = {}
    for sample in (one for family in text_string_to_metric_families(text) for one in family.samples):
        if sample.name.startswith("pagedkv:"):
            labels = [f"{name}={value}" for name, value in sorted(sample.labels.items()) if name != "model_name"]
            name = " ".join([sample.name.removeprefix("pagedkv:"), *labels])
            assert name not in found and sample.labels["model_name"] == NAME
            found[name] = sample.value
    return found


def body(number: int, **given: Any) -> dict[str, Any]:
    return {"prompt": f"{PREFIX}{number}", "ignore_eos": True, "max_tokens": 300, **given}


def streamed(http: httpx.Client, stack: contextlib.ExitStack, number: int) -> Iterator[dict[str, Any]]:
    """The chunks of an answer that has begun."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = stack.enter_context(http.stream("POST", "/v1/completions", json=body(number, **options)))
    return chunks_of(answer)


def chunks_of(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    """Events end with an empty line; what else Unicode takes for a line's end may stand in the text."""
    rest = b""
    for data in answer.iter_bytes():
        *events, rest = (rest + data).split(b"\n\n")
        yield from (json.loads(event.removeprefix(b"data: ")) for event in events if event != b"data: [DONE]")
    assert rest == b""


def test_u68_every_series_before_during_and_after_three_requests(api: Api) -> None:
    before = scrape(api)
    nonzero = {name.split()[0] for name, value in before.items() if value}
    assert nonzero == {"build_info", "cache_config_info", "engine_up", "kv_cache_blocks"}
    assert before["kv_cache_blocks state=free tier=device"] == 512

    with httpx.Client(base_url=api.url, timeout=120) as http, contextlib.ExitStack() as stack:
        whole = http.post("/v1/completions", json=body(0, max_tokens=5, n=2)).raise_for_status().json()["usage"]
        streams = [streamed(http, stack, number) for number in range(1, 4)]
        first = [next(chunks) for chunks in streams]
        during, again = scrape(api), scrape(api)
        rest = [list(chunks) for chunks in streams]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in first)
    for name in ("num_requests_open", "num_requests_running"):
        assert during[name] == again[name] == 3, "gauges are not added up over scrapes"
    assert 0 < during["kv_cache_usage_perc"] < 1
    assert during["kv_cache_blocks state=used tier=device"] / 512 == pytest.approx(during["kv_cache_usage_perc"])
    assert all(again[name] >= during[name] for name in during if "_total" in name or "_bucket" in name)

    after, usage = scrape(api), [whole, *(chunks[-1]["usage"] for chunks in rest)]
    assert before.keys() == during.keys() == after.keys()
    prompts, answers = (sum(one[f"{kind}_tokens"] for one in usage) for kind in ("prompt", "completion"))
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage)
    assert (prompts, answers) == (4 * (1 + len(PREFIX) + 1), 3 * 300 + 2 * 5), "the first token, and one a byte"
    assert after["prompt_tokens_total"] == after["request_prompt_tokens_sum"] == prompts
    assert after["generation_tokens_total"] == after["request_generation_tokens_sum"] == answers
    hits = [after[f"prefix_cache_hits_total tier={tier}"] for tier in ("device", "host")]
    assert sum(hits) == cached >= 3 * (len(PREFIX) // 4) * 4, "whole blocks of what all begin with"
    assert after["prefix_cache_queries_total"] == prompts, "hits and misses"
    assert after["computed_tokens_total"] == prompts - cached + answers - 5, "no answer's last token is computed"
    assert after["inter_token_latency_seconds_count"] == answers - 5
    assert after["request_success_total finished_reason=length"] == 5, "each of n"
    for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time"):
        assert after[f"{name}_seconds_count"] == 4
    assert after["http_requests_total handler=/v1/completions method=POST status=200"] == 4
    gauges = [after[f"num_requests_{state}"] for state in ("open", "running", "waiting", "swapped", "loading")]
    assert gauges == [0, 0, 0, 0, 0] and after["kv_cache_usage_perc"] == 0
    blocks = {state: after[f"kv_cache_blocks state={state} tier=device"] for state in ("used", "cached", "free")}
    assert blocks["used"] == 0 < blocks["cached"] and sum(blocks.values()) == 512


def test_u68_what_goes_wrong_is_counted_once_by_its_kind(api: Api) -> None:
    before = scrape(api)
    with httpx.Client(base_url=api.url, timeout=120) as http:
        assert http.post("/v1/completions", json=body(1, max_tokens=-1)).status_code == 400
        assert http.post("/v1/completions", content=b"{}").status_code == 415
        assert http.post("/v1/completions", json=body(1, max_tokens=5000)).status_code == 400
        for path in ("/nowhere", "/v1/models/other", "/../../etc/passwd"):
            assert http.get(path).status_code == 404
        with http.stream("POST", "/v1/completions", json=body(1, stream=True)) as answer:
            next(chunks_of(answer))
    while (found := scrape(api))["num_requests_open"]:
        pass
    del found["http_requests_total handler=/metrics method=GET status=200"]
    found = {name: value - before.get(name, 0) for name, value in found.items()}
    errors = {name.partition("kind=")[2]: value for name, value in found.items() if "errors_total" in name and value}
    expected = {"invalid_value": 1, "unsupported_media_type": 1, "context_length_exceeded": 1}
    assert errors == {**expected, "invalid_request_error": 2, "model_not_found": 1}
    aborted = {name.partition("reason=")[2]: value for name, value in found.items() if "aborted_total" in name}
    assert aborted == {"disconnect": 1, "timeout": 0, "shutdown": 0, "client": 0, "other": 0}
    assert found["request_success_total finished_reason=abort"] == 1
    handlers = {name: value for name, value in found.items() if name.startswith("http_requests_total") and value}
    assert handlers == {
        "http_requests_total handler=/v1/completions method=POST status=200": 1,
        "http_requests_total handler=/v1/completions method=POST status=400": 2,
        "http_requests_total handler=/v1/models/{name:path} method=GET status=404": 1,
        "http_requests_total handler=other method=GET status=404": 2,
        "http_requests_total handler=other method=POST status=415": 1,
    }
