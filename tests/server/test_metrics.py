"""GET /metrics: read back with the client library's parser, sums by hand, and what the dashboard and the guide name."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from pagedkv.api.errors import EngineDead, RequestInvalid, RequestTooLong
from pagedkv.engine.metrics import EngineMetrics, PoolMetrics
from pagedkv.engine.outputs import RequestMetrics
from pagedkv.server.errors import HTTPError, QueueFull, TimedOut, Unavailable
from pagedkv.server.guard import guarded
from pagedkv.server.keys import Keys
from pagedkv.server.messages import Ending, Facts, Failure, News, Piece
from pagedkv.server.metrics import KINDS, ServerMetrics
from pagedkv.server.settings import ServerConfig

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "metrics.md").read_text("utf-8")
DASHBOARD = json.loads((ROOT / "docs" / "deploy" / "grafana" / "pagedkv.json").read_text("utf-8"))
ALERTS = yaml.safe_load((ROOT / "docs" / "deploy" / "prometheus-alerts.yml").read_text("utf-8"))
ROUTES = {"/health": ("GET",), "/v1/completions": ("POST",)}

Labels = frozenset[tuple[str, str]]


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> ServerMetrics:
    return ServerMetrics("demo", ROUTES, clock=clock, wall=lambda: clock.now + 1.7e9)


def samples(metrics: ServerMetrics, start: str | tuple[str, ...] = "") -> dict[tuple[str, Labels], float]:
    """Every series by name and labels, or those that begin so; none twice."""
    text, content_type = metrics.text()
    assert content_type.startswith("text/plain; version=0.0.4")
    lines = [line for line in text.decode().splitlines(keepends=True) if line.startswith(start)]
    found = [
        ((sample.name, frozenset(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families("".join(lines))
        for sample in family.samples
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    """One series of ours."""
    found = samples(metrics, f"pagedkv:{name}")
    return found[f"pagedkv:{name}", frozenset({"model_name": "demo", **labels}.items())]


def counts(metrics: ServerMetrics, name: str, **labels: str) -> tuple[float, float]:
    """A histogram's number of values and their sum."""
    return value(metrics, f"{name}_count", **labels), value(metrics, f"{name}_sum", **labels)


def engine_metrics(**given: Any) -> EngineMetrics:
    """A record that is 0 where nothing else is given."""
    zeros: dict[str, Any] = {one.name: 0 for one in dataclasses.fields(EngineMetrics)}
    pools = {tier: PoolMetrics(used=0, cached=0, free=0, moving=0) for tier in ("device", "host")}
    return EngineMetrics(**{**zeros, **pools, **given})


def piece(key: int, tokens: int, reason: str | None = None, index: int = 0) -> Piece:
    return Piece(key=key, index=index, text="x" * tokens, token_ids=[7] * tokens, finish_reason=reason)


def ending(key: int, prompt: int, cached: int = 0, host: int = 0, **moments: Any) -> Ending:
    """`moments` are those of `RequestMetrics`; what is not given has not come."""
    return Ending(
        key=key,
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        num_host_cached_tokens=host,
        metrics=RequestMetrics(**{"arrival_time": 0.0, **moments}),
    )


# -- before anything ---------------------------------------------------------------------------------------------------


def test_every_series_is_there_from_the_start_with_zero(metrics: ServerMetrics) -> None:
    before = samples(metrics)
    ours = {key: number for key, number in before.items() if key[0].startswith("pagedkv:")}
    assert len(ours) > 150
    assert {name for (name, _), number in ours.items() if number} == {"pagedkv:build_info", "pagedkv:cache_config_info"}
    assert all(("model_name", "demo") in labels for _, labels in ours)
    metrics.engine_up(True)
    metrics.submitted(1)
    metrics.news(News(accepted=[1], step_seconds=0.1, pieces=[piece(1, 3, "stop")], metrics=engine_metrics(running=1)))
    metrics.news(News(endings=[ending(1, 5, first_scheduled_time=1.0, first_token_time=2.0, finished_time=3.0)]))
    metrics.refused(EngineDead("gone"))
    metrics.aborted("disconnect")
    metrics.engine_restarted()
    metrics.http("/health", "GET", 200, 0.1)
    assert samples(metrics).keys() == before.keys(), "nothing that happened made a series"


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("request_success_total", "finished_reason", {"stop", "length", "abort", "error"}),
        ("requests_aborted_total", "reason", {"disconnect", "timeout", "shutdown", "client", "other"}),
        ("prefix_cache_hits_total", "tier", {"device", "host"}),
        ("kv_cache_blocks", "tier", {"device", "host"}),
        ("kv_cache_blocks", "state", {"used", "cached", "free", "moving"}),
        ("http_requests_total", "handler", {*ROUTES, "other"}),
    ],
)
def test_label_values_from_the_start(metrics: ServerMetrics, name: str, label: str, values: set[str]) -> None:
    assert {dict(labels)[label] for one, labels in samples(metrics) if one == f"pagedkv:{name}"} == values


def test_the_registry_is_its_own(metrics: ServerMetrics) -> None:
    other = ServerMetrics("demo", ROUTES)
    other.engine_restarted()
    assert value(metrics, "engine_restarts_total") == 0
    assert not any(family.name.startswith("pagedkv") for family in REGISTRY.collect())
    assert any(name == "process_resident_memory_bytes" for name, _ in samples(metrics))


# -- requests ----------------------------------------------------------------------------------------------------------


def test_one_streamed_request_by_hand(metrics: ServerMetrics, clock: Clock) -> None:
    """Sent at 100, first step at 101, first token at 102, then tokens 0.5, 0.25 and 0.25 s apart."""
    metrics.submitted(1)
    metrics.news(News(accepted=[1]))
    for moment, tokens, reason in ((102.0, 1, None), (102.5, 1, None), (103.0, 2, "length")):
        clock.now = moment
        metrics.news(News(pieces=[piece(1, tokens, reason)], step_seconds=0.125))
    moments = {"first_scheduled_time": 101.0, "first_token_time": 102.0, "finished_time": 103.0}
    metrics.news(News(endings=[ending(1, 10, cached=8, host=3, **moments)]))
    assert counts(metrics, "request_queue_time_seconds") == (1, 1.0)
    assert counts(metrics, "time_to_first_token_seconds") == (1, 2.0)
    assert counts(metrics, "e2e_request_latency_seconds") == (1, 3.0)
    assert counts(metrics, "inter_token_latency_seconds") == (3, 1.0)
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.3") == 2
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.5") == 3, "an end belongs to its bucket"
    assert counts(metrics, "step_time_seconds") == (3, 0.375)
    assert counts(metrics, "request_prompt_tokens") == (1, 10)
    assert counts(metrics, "request_generation_tokens") == (1, 4)
    assert (value(metrics, "prompt_tokens_total"), value(metrics, "generation_tokens_total")) == (10, 4)
    assert value(metrics, "prefix_cache_queries_total") == 10
    assert [value(metrics, "prefix_cache_hits_total", tier=tier) for tier in ("device", "host")] == [5, 3]
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "engine_last_step_timestamp_seconds") == 1.7e9 + 103


def test_a_request_without_stream_counts_the_mean_between_its_tokens(metrics: ServerMetrics, clock: Clock) -> None:
    """Two answers of 5 and 3 tokens in 2 s: 0.5 s a step, 4 + 2 times."""
    metrics.submitted(4)
    clock.now = 104.0
    pieces = [piece(4, 5, "stop", 0), piece(4, 3, "length", 1)]
    moments = {"first_scheduled_time": 101.0, "first_token_time": 102.0, "finished_time": 104.0}
    metrics.news(News(pieces=pieces, endings=[ending(4, 7, **moments)]))
    assert counts(metrics, "inter_token_latency_seconds") == (6, 3.0)
    assert value(metrics, "generation_tokens_total") == 8
    assert counts(metrics, "request_generation_tokens") == (1, 8)
    assert [value(metrics, "request_success_total", finished_reason=why) for why in ("stop", "length")] == [1, 1]
    assert value(metrics, "prompt_tokens_total") == 7, "a prompt counts once"


def test_answers_of_one_request_have_times_of_their_own(metrics: ServerMetrics, clock: Clock) -> None:
    for moment, indices in ((101.0, (0, 1)), (102.0, (0,)), (104.0, (0, 1))):
        clock.now = moment
        metrics.news(News(pieces=[piece(1, 1, index=index) for index in indices]))
    assert counts(metrics, "inter_token_latency_seconds") == (3, 1.0 + 2.0 + 3.0)


def test_a_request_given_up_in_the_queue_was_never_looked_up(metrics: ServerMetrics) -> None:
    metrics.submitted(1)
    metrics.aborted("timeout")
    metrics.news(News(pieces=[piece(1, 0, "abort")], endings=[ending(1, 50, finished_time=101.0)]))
    assert value(metrics, "requests_aborted_total", reason="timeout") == 1
    assert value(metrics, "request_success_total", finished_reason="abort") == 1
    assert (value(metrics, "prompt_tokens_total"), value(metrics, "prefix_cache_queries_total")) == (0, 0)
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_queue_time_seconds"):
        assert counts(metrics, name) == (0, 0)


def test_a_request_given_up_in_between_counts_with_what_was_done(metrics: ServerMetrics) -> None:
    metrics.submitted(1)
    metrics.news(News(pieces=[piece(1, 1)]))
    end = ending(1, 6, first_scheduled_time=100.0, first_token_time=100.5, finished_time=101.0)
    metrics.news(News(pieces=[piece(1, 0, "abort")], endings=[end]))
    assert (value(metrics, "prompt_tokens_total"), value(metrics, "generation_tokens_total")) == (6, 1)
    assert counts(metrics, "time_to_first_token_seconds") == (1, 0.5)
    assert counts(metrics, "e2e_request_latency_seconds") == (0, 0)


def test_an_embedding_ends_too(metrics: ServerMetrics) -> None:
    metrics.submitted(1)
    end = ending(1, 12, first_scheduled_time=100.0, finished_time=101.0)
    metrics.news(News(pieces=[piece(1, 0, "stop")], endings=[dataclasses.replace(end, embedding=[0.5])]))
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert counts(metrics, "e2e_request_latency_seconds") == (1, 1.0)
    assert counts(metrics, "time_to_first_token_seconds") == (0, 0)
    assert value(metrics, "prompt_tokens_total") == 12


def test_open_requests_are_those_that_have_not_ended(metrics: ServerMetrics) -> None:
    metrics.engine_up(True)
    for key in range(1, 6):
        metrics.submitted(key)
    metrics.news(News(accepted=[1, 2, 3, 4]))
    assert value(metrics, "num_requests_open") == 5
    metrics.news(News(refused=[(5, Failure(kind="RequestTooLong", message="long"))], endings=[ending(1, 1)]))
    assert value(metrics, "num_requests_open") == 3
    metrics.news(News(refused=[(-9, Failure(kind="EngineDead", message="a probe"))]))
    metrics.engine_restarted()
    assert value(metrics, "num_requests_open") == 0


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RequestInvalid("bad", field="n"), "invalid_value"),
        (RequestTooLong("long"), "context_length_exceeded"),
        (QueueFull("full", retry_after=1), "queue_full"),
        (TimedOut("late"), "request_timeout"),
        (EngineDead("dead"), "engine_dead"),
        (Unavailable("no", code="engine_starting"), "engine_starting"),
        (HTTPError(404, "no path"), "invalid_request_error"),
        (HTTPError(401, "no", type="authentication_error", code="made_up"), "authentication_error"),
        (HTTPError(418, "no", type="teapot", code="made_up"), "other"),
        (ZeroDivisionError(), "internal_error"),
    ],
)
def test_errors_by_kind(metrics: ServerMetrics, error: BaseException, kind: str) -> None:
    metrics.refused(error)
    found = {
        dict(labels)["kind"]: number
        for (name, labels), number in samples(metrics).items()
        if name == "pagedkv:request_errors_total"
    }
    assert found == {one: float(one == kind) for one in KINDS}


def test_the_guards_refusals_are_counted_too(metrics: ServerMetrics) -> None:
    app = guarded(JSONResponse({}), ServerConfig(max_body_size=4), Keys.of(["secret"]), count=metrics.refused)
    client = TestClient(app, base_url="http://localhost")
    right = {"Authorization": "Bearer secret"}
    answers = [
        client.get("/v1/models"),
        client.get("/v1/models", headers={"Host": "evil.example"}),
        client.post("/v1/completions", json={"prompt": "long"}, headers=right),
        client.post("/v1/completions", content=b"{}", headers=right),
        client.get("/v1/models", headers=right),
    ]
    assert [answer.status_code for answer in answers] == [401, 421, 413, 415, 200]
    kinds = ("invalid_api_key", "foreign_host", "body_too_large", "unsupported_media_type")
    assert [value(metrics, "request_errors_total", kind=kind) for kind in kinds] == [1, 1, 1, 1]


# -- the engine's own numbers ------------------------------------------------------------------------------------------


def test_gauges_are_the_engines(metrics: ServerMetrics) -> None:
    metrics.engine_up(True)
    device, host = PoolMetrics(used=5, cached=2, free=2, moving=1), PoolMetrics(used=1, cached=0, free=3, moving=0)
    states = {"running": 3, "waiting": 4, "swapped": 1, "loading": 2}
    metrics.news(News(pong=1, metrics=engine_metrics(**states, device=device, host=host)))
    assert {state: value(metrics, f"num_requests_{state}") for state in states} == states
    for tier, pool in (("device", device), ("host", host)):
        blocks = {state: value(metrics, "kv_cache_blocks", tier=tier, state=state) for state in ("used", "free")}
        assert blocks == {"used": pool.used, "free": pool.free}
    assert value(metrics, "kv_cache_usage_perc") == pytest.approx(0.6)
    metrics.engine_up(False)
    assert [value(metrics, f"num_requests_{state}") for state in states] == [0, 0, 0, 0]
    assert (value(metrics, "kv_cache_usage_perc"), value(metrics, "engine_up")) == (0, 0)


COUNTERS = {
    "num_preemptions_total": "preemptions",
    "swaps_total": "swaps",
    "recomputed_tokens_total": "recomputed_tokens",
    "blocks_saved_total": "blocks_saved",
    "blocks_fetched_total": "blocks_fetched",
    "computed_tokens_total": "computed_tokens",
    "replayed_steps_total": "replayed_steps",
}


def totals(metrics: ServerMetrics) -> dict[str, float]:
    """Those counters, read back once."""
    found = samples(metrics, tuple(f"pagedkv:{name}" for name in COUNTERS))
    return {name.removeprefix("pagedkv:"): number for (name, _), number in found.items()}


@settings(max_examples=12, deadline=None)
@given(lives=st.lists(st.lists(st.integers(0, 50), max_size=3), max_size=4))
def test_counters_go_on_over_restarts(lives: list[list[int]]) -> None:
    """Each life of an engine counts from 0; what is shown never falls, and is the sum of all lives."""
    metrics, shown = ServerMetrics("demo", {}), dict.fromkeys(COUNTERS, 0.0)
    for number, life in enumerate(lives):
        if number:
            metrics.engine_restarted()
        for total in itertools.accumulate(life):
            metrics.news(News(pong=1, metrics=engine_metrics(**dict.fromkeys(COUNTERS.values(), total))))
            now = totals(metrics)
            assert all(now[name] >= shown[name] for name in COUNTERS)
            shown = now
    assert {*totals(metrics).values()} == {sum(itertools.chain(*lives))}
    assert value(metrics, "engine_restarts_total") == max(0, len(lives) - 1)


def test_what_the_engine_says_of_itself(metrics: ServerMetrics) -> None:
    facts = Facts(
        backend="cpu",
        dtype="fp32",
        kv_dtype="bf16",
        quantization="",
        block_size=16,
        num_blocks=65,
        max_model_len=128,
        max_num_seqs=4,
        capacity=1024,
        vocab_size=100,
        pooling=False,
        tokenizer=None,
    )
    metrics.describe(facts)
    cache = {"block_size": "16", "num_blocks": "65", "kv_dtype": "bf16", "max_model_len": "128"}
    assert value(metrics, "cache_config_info", **cache) == 1
    found = [dict(labels) for name, labels in samples(metrics) if name == "pagedkv:build_info"]
    assert [(one["backend"], one["model"]) for one in found] == [("cpu", "demo")]
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", found[0]["version"])


# -- HTTP --------------------------------------------------------------------------------------------------------------


def test_answers_by_path_method_and_status(metrics: ServerMetrics) -> None:
    for status, seconds in ((200, 0.5), (200, 1.0), (429, 0.25)):
        metrics.http("/v1/completions", "POST", status, seconds)
    found = {
        status: value(metrics, "http_requests_total", handler="/v1/completions", method="POST", status=status)
        for status in ("200", "429")
    }
    assert found == {"200": 2, "429": 1}
    assert counts(metrics, "http_request_duration_seconds", handler="/v1/completions") == (3, 1.75)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.text(), st.text(), st.integers()), min_size=1, max_size=20))
def test_no_client_makes_series(requests: list[tuple[str, str, int]]) -> None:
    """Paths, methods and statuses of any kind: at most one series more for each status that exists."""
    metrics = ServerMetrics('de"mo\\\n', ROUTES)
    before = len(samples(metrics))
    for path, method, status in requests:
        metrics.http(path, method, status, 0.1)
        metrics.http(None, method, 404, 0.1)
        metrics.aborted(path)
        metrics.refused(HTTPError(400, path, type=method, code=path))
    after = samples(metrics)
    made = [dict(labels) for name, labels in after if name == "pagedkv:http_requests_total"]
    assert {one["handler"] for one in made} == {*ROUTES, "other"}
    assert {one["method"] for one in made} <= {"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "other"}
    assert all(one["status"] == "other" or 100 <= int(one["status"]) <= 599 for one in made)
    assert len(after) <= before + len({(method, status) for _, method, status in requests}) * 2
    total = sum(number for (name, _), number in after.items() if name == "pagedkv:http_requests_total")
    assert total == 2 * len(requests)
    assert {dict(labels).get("model_name") for name, labels in after if "pagedkv" in name} == {'de"mo\\\n'}


# -- what names them ---------------------------------------------------------------------------------------------------


def names(metrics: ServerMetrics) -> set[str]:
    return {name for name, _ in samples(metrics) if name.startswith("pagedkv:")}


def families(metrics: ServerMetrics) -> dict[str, str]:
    """Names as the guide has them, and types."""
    text = metrics.text()[0].decode()
    found = re.findall(r"^# TYPE (pagedkv:\S+) (\w+)$", text, re.M)
    assert len(dict(found)) == len(found)
    return dict(found)


def test_the_guide_has_every_series_with_its_type_and_labels(metrics: ServerMetrics) -> None:
    rows = re.findall(r"^\| `(pagedkv:\w+)` \| (\w+) \|(.*?)\| \S.* \|$", GUIDE, re.M)
    assert {name: kind for name, kind, _ in rows} == families(metrics)
    assert len(rows) == len(families(metrics))
    shown = samples(metrics)
    labels = {
        name: {label for one, pairs in shown if re.fullmatch(f"{name}(_bucket)?", one) for label, _ in pairs}
        for name, _, _ in rows
    }
    for name, _, cell in rows:
        documented = set(re.findall(r"`(\w+)`", re.sub(r":[^;]*", "", cell)))
        assert documented == labels[name] - {"model_name", "le"}, name


def test_the_guide_has_every_kind_of_error_and_every_value(metrics: ServerMetrics) -> None:
    section = GUIDE[GUIDE.index("## Kinds of errors") : GUIDE.index("## Buckets")]
    table = {kind for row in re.findall(r"^\| \d.*$", section, re.M) for kind in re.findall(r"`(\w+)`", row)}
    assert table == set(KINDS) - {"other"}
    for name, cell in re.findall(r"^\| `(pagedkv:\w+)` \| \w+ \| `\w+`: (.*?) \|", GUIDE, re.M):
        known = {text for one, labels in samples(metrics) if one == name for _, text in labels}
        assert set(re.findall(r"`(\w+)`", cell)) <= known, name


def test_every_link_of_the_guide_leads_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", GUIDE)
    assert len(targets) >= 4 and all((ROOT / "docs" / target).is_file() for target in targets)


EXPRESSIONS = [
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", [])),
    *(note["expr"] for note in DASHBOARD["annotations"]["list"]),
]
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *(rule["expr"] for rule in RULES)])
def test_expressions_ask_for_series_and_labels_that_exist(metrics: ServerMetrics, expression: str) -> None:
    asked = set(re.findall(r"pagedkv:\w+", expression))
    assert asked and asked <= names(metrics), expression
    labels = {
        label
        for found in re.findall(r"\{([^}]*)\}|by \(([^)]*)\)", expression)
        for label in re.findall(r"(\w+)(?:=|,|$)", ",".join(re.sub(r'"[^"]*"', "", part) for part in found))
    }
    known = {label for name, pairs in samples(metrics) if name in asked for label, _ in pairs}
    assert labels <= known | {"instance"}, expression
    for label, wanted in re.findall(r'(\w+)=~?"([a-z_|]+)"', expression):
        values = {text for name, pairs in samples(metrics) if name in asked for one, text in pairs if one == label}
        assert set(wanted.split("|")) <= values, expression
    assert expression.count("(") == expression.count(")") and expression.count("{") == expression.count("}")


def test_histograms_are_asked_by_bucket_and_counters_by_rate() -> None:
    for expression in [*EXPRESSIONS, *(rule["expr"] for rule in RULES)]:
        for name in re.findall(r"pagedkv:\w+(?:_total|_bucket|_count)\b", expression):
            assert re.search(rf"(rate|increase|changes)\({name}", expression), expression
        if "histogram_quantile" in expression:
            assert re.search(r"by \(([\w, ]*\b)?le\b[\w, ]*\) ", expression) and "_bucket" in expression, expression


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    assert DASHBOARD["schemaVersion"] >= 39 and DASHBOARD["uid"] == "pagedkv" and DASHBOARD["id"] is None
    panels = DASHBOARD["panels"]
    assert [one["title"] for one in panels if one["type"] == "row"] == [
        "Traffic",
        "Latency",
        "Cache",
        "Engine",
        "Errors",
    ]
    assert len({one["id"] for one in panels}) == len(panels)
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    for panel in panels:
        if panel["type"] != "row":
            sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
            assert all(one == {"type": "prometheus", "uid": "${datasource}"} for one in sources)
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
    assert not overlapping([one["gridPos"] for one in panels])


def overlapping(places: list[dict[str, int]]) -> list[tuple[int, int]]:
    """Cells of Grafana's 24 columns that two panels claim, or that lie outside."""
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    return [cell for cell in {*cells} if cells.count(cell) > 1 or cell[0] >= 24]


def test_the_dashboard_shows_nearly_every_series(metrics: ServerMetrics) -> None:
    shown = {re.sub(r"_(bucket|count)$", "", name) for one in EXPRESSIONS for name in re.findall(r"pagedkv:\w+", one)}
    assert set(families(metrics)) - shown == {"pagedkv:build_info", "pagedkv:cache_config_info"}


def test_alerts_have_what_prometheus_wants_of_a_rule() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) >= 4
    for rule in RULES:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert re.fullmatch(r"[1-9]\d*[smh]", rule.get("for", "1m"))
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
