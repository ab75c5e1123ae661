"""How a server ends, and how its engine may: stuck, restarted, crashed, drained, stopped at once (U66, U67)."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest

from tests.helpers.server_rig import PACE, RAISE, SLEEP, at_rest, events, free_port, gone, scrape, served, wait_for

TEXT = "/v1/completions"
LONG: dict[str, Any] = {"prompt": f"{PACE} long", "max_tokens": 900, "ignore_eos": True, "stream": True}


def says(http: httpx.Client, text: str = "Hi") -> bool:
    """Whether the model answers as it is asked to."""
    answer = http.post(TEXT, json={"prompt": f"<<{text}>>"})
    return answer.status_code == 200 and answer.json()["choices"][0]["text"] == text


@pytest.fixture(scope="module")
def port() -> int:
    """One for all servers here, which listen on it one after the other (U67)."""
    return free_port()


@contextmanager
def begun(http: httpx.Client, **given: Any) -> Iterator[Generator[Any, None, None]]:
    """The events of an answer that has begun."""
    with http.stream("POST", TEXT, json={**LONG, **given}) as answer:
        assert answer.status_code == 200, answer.read()
        chunks = events(answer.iter_bytes())
        next(chunks)
        yield chunks
        chunks.close()


def last_error(chunks: Iterator[Any]) -> Any:
    """What a stream that could not go on ends with: an error, and no [DONE]."""
    *_, last = chunks
    assert set(last) == {"error"}
    return last["error"]


def fail_all(http: httpx.Client, fault: str) -> tuple[Any, Any]:
    """What a stream and a whole answer get when the engine is lost under them."""
    with ThreadPoolExecutor(1) as pool, begun(http) as chunks:
        whole: Future[httpx.Response] = pool.submit(http.post, TEXT, json={**LONG, "stream": False})
        wait_for(lambda: scrape(http)["num_requests_running"] == 2)
        broken = http.post(TEXT, json={"prompt": f"{fault} now", "max_tokens": 9, "ignore_eos": True})
        streamed = last_error(chunks)
    for answer in (broken, whole.result()):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
    return streamed, broken.json()["error"]


# -- U66: the engine is lost -------------------------------------------------------------------------------------------


def test_u66_a_stuck_engine_is_replaced_and_one_that_raises_after_it_ends_the_server(port: int) -> None:
    with served(port=port, watchdog_timeout=2.0, restart_engine=1, exit_delay=2.0) as server, server.client() as http:
        first = server.engine()
        streamed, _ = fail_all(http, SLEEP)
        assert "no sign of life" in streamed["message"]
        health = http.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_starting")
        refused = http.post(TEXT, json={"prompt": "x"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        wait_for(lambda: says(http), 60)
        assert server.engine() != first
        wait_for(lambda: gone(first))
        assert http.get("/health").status_code == http.get("/ready").status_code == 200
        found = at_rest(http)
        assert (found["engine_restarts_total"], found["engine_up"]) == (1, 1)

        streamed, broken = fail_all(http, RAISE)
        assert streamed == broken and "the backend fails as it was asked to" in broken["message"]
        health = http.get("/health")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_dead")
        assert http.get("/ready").status_code == http.post(TEXT, json={"prompt": "x"}).status_code == 503
        assert scrape(http)["engine_up"] == 0
        assert server.ended() == 1
        assert "the backend fails as it was asked to" in server.log and "no restart is left" in server.log


# -- U67: the server is stopped ----------------------------------------------------------------------------------------


def test_u67_what_runs_is_finished_and_nothing_new_is_taken(port: int) -> None:
    with served(port=port, drain_timeout=60.0) as server, server.client() as http:
        with begun(http, max_tokens=150) as chunks:
            server.signal()
            wait_for(lambda: http.get("/health").json().get("status") == "draining")
            refused = http.post(TEXT, json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
            *_, before, last = chunks
        assert (before["choices"][0]["finish_reason"], last) == ("length", "[DONE]")
        assert server.ended() == 0


def test_u67_without_time_to_drain_streams_end_with_an_error(port: int) -> None:
    """By Ctrl-C this time. The front has no copy of torch in it, so all of the model's memory is the engine's."""
    with served(port=port, drain_timeout=0.0) as server, server.client() as http:
        maps = [mapped.path for mapped in psutil.Process(server.process.pid).memory_maps()]
        assert any("libpython" in path or "uvloop" in path for path in maps) and not any(
            "torch" in path for path in maps
        )
        with begun(http) as chunks:
            server.signal(signal.SIGINT)
            assert last_error(chunks)["code"] == "stopping"
        assert server.ended() == 0


def test_u67_a_second_signal_stops_at_once(port: int) -> None:
    with served(port=port, drain_timeout=600.0) as server, server.client() as http:
        with begun(http) as chunks:
            server.signal()
            wait_for(lambda: "stopping\n" in server.log)
            server.signal()
            assert last_error(chunks)["code"] == "stopping"
        assert server.ended() == 0
        assert "stopping at once" in server.log
