"""The cases from public bug reports once more, over real HTTP: the front and the engine in processes of their own."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.helpers.server_rig import NAME, PACE, Served, at_rest, events, scrape, served, wait_for

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USED = "kv_cache_blocks state=used tier=device"
KEYS = {"Authorization": "Bearer key-of-alice"}, {"Authorization": "Bearer key-of-bob"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(api_keys=["key-of-alice", "key-of-bob"], max_queue=64) as made:
        yield made
        made.signal()
        assert made.ended() == 0


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with server.client(headers=KEYS[0]) as made:
        yield made


@pytest.fixture(autouse=True)
def served_after(http: httpx.Client) -> Iterator[None]:
    yield
    at_rest(http)
    assert http.post(TEXT, json={"prompt": "<<Hi>>"}).json()["choices"][0]["text"] == "Hi"


class Told:
    """The answer to one call, from a stream or whole; `pieces` by choice as they came."""

    def __init__(self, http: httpx.Client, body: dict[str, Any], path: str = TEXT, *, stream: bool = False) -> None:
        self.pieces: dict[int, list[str]] = {}
        self.ends: dict[int, Any] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.usage: Any = None
        self.chunks: list[Any] = []
        if stream:
            body = {"stream_options": {"include_usage": True}, **body, "stream": True}
            with http.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200, answer.read()
                self.chunks = list(events(answer.iter_bytes()))
            assert self.chunks.pop() == "[DONE]"
        else:
            self.chunks = [http.post(path, json=body).raise_for_status().json()]
        for chunk in self.chunks:
            self.usage = chunk.get("usage") or self.usage
            for choice in chunk["choices"]:
                self._add(choice)

    def _add(self, choice: Any) -> None:
        index = choice["index"]
        assert index not in self.ends, "nothing comes after the end"
        text = choice["text"] if "text" in choice else choice.get("delta", choice.get("message")).get("content")
        self.pieces.setdefault(index, []).append(text or "")
        self.logprobs.setdefault(index, []).append(choice["logprobs"])
        if choice["finish_reason"] is not None:
            self.ends[index] = (choice["finish_reason"], choice["stop_reason"])

    @property
    def texts(self) -> list[str]:
        return ["".join(self.pieces[index]) for index in sorted(self.pieces)]


def error_of(answer: httpx.Response, status: int = 400) -> Any:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


def running(http: httpx.Client) -> float:
    return scrape(http)["num_requests_running"]


# -- U09: who shares a prefix ------------------------------------------------------------------------------------------


def cached(http: httpx.Client, prompt: str, **given: Any) -> int:
    told = Told(http, {"prompt": prompt, "max_tokens": 1, "add_special_tokens": False, **given})
    return int(told.usage["prompt_tokens_details"]["cached_tokens"])


def test_u09_a_prefix_is_found_under_its_own_salt_only(http: httpx.Client) -> None:
    prompt = "sixteen tokens! "
    assert len(prompt) == 16
    found = [cached(http, prompt, **({"cache_salt": salt} if salt else {})) for salt in ("a", "b", "a", None)]
    assert found == [0, 0, 12, 0], "of 16 tokens the last is always computed: three whole blocks of four"


def test_u09_two_keys_never_share_whatever_salt_they_name(server: Served, http: httpx.Client) -> None:
    prompt = "what one of them asked before"
    with server.client(headers=KEYS[1]) as other:
        assert [cached(http, prompt), cached(other, prompt)] == [0, 0]
        assert cached(http, prompt) == cached(other, prompt) == 28
        salted = [cached(each, prompt, cache_salt="s") for each in (http, other, http, other)]
    assert salted == [0, 0, 28, 28]


# -- U37, U38: clients that leave --------------------------------------------------------------------------------------


def raw_request(server: Served, body: dict[str, Any]) -> socket.socket:
    """A connection over which one request has been sent."""
    data = json.dumps({"model": NAME, **body}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {KEYS[0]['Authorization']}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


def given_up(http: httpx.Client, before: dict[str, float], most: int) -> dict[str, float]:
    """The metrics after one client left, whose answer must not have come near its `most` tokens."""
    after = at_rest(http)
    assert after["requests_aborted_total reason=disconnect"] - before["requests_aborted_total reason=disconnect"] == 1
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < most
    return after


@pytest.mark.parametrize("n", [1, 2])
def test_u37_a_client_that_leaves_a_stream_frees_its_blocks(http: httpx.Client, n: int) -> None:
    before = scrape(http)
    body = {"prompt": f"{PACE} leaving", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": n}
    with http.stream("POST", TEXT, json=body) as answer:
        chunks = events(answer.iter_bytes())
        for _ in range(3):
            next(chunks)
        during = scrape(http)
        assert (during["num_requests_running"], during[USED] > 0) == (n, True)
    given_up(http, before, 900)


@pytest.mark.parametrize("leave", ["close", "half-close", "reset"])
@pytest.mark.parametrize("stream", [True, False])
def test_u37_u38_every_way_to_leave(server: Served, http: httpx.Client, stream: bool, leave: str) -> None:
    before = scrape(http)
    body = {"prompt": f"{PACE} leaving", "max_tokens": 900, "ignore_eos": True, "stream": stream}
    with raw_request(server, body) as connection:
        wait_for(lambda: running(http) == 1)
        if stream:
            assert connection.recv(10).startswith(b"HTTP/1.1")
        if leave == "half-close":
            connection.shutdown(socket.SHUT_WR)
            given_up(http, before, 900)
        elif leave == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    given_up(http, before, 900)


def test_u38_a_client_that_leaves_while_its_request_is_queued(server: Served, http: httpx.Client) -> None:
    before = scrape(http)
    body = {"prompt": f"{PACE} holding", "max_tokens": 900, "ignore_eos": True, "stream": True, "n": 8}
    with http.stream("POST", TEXT, json=body) as answer:
        chunks = events(answer.iter_bytes())
        next(chunks)
        wait_for(lambda: running(http) == 8)
        held = scrape(http)[USED]
        with raw_request(server, {"prompt": "never begun", "max_tokens": 900}):
            wait_for(lambda: scrape(http)["num_requests_waiting"] == 1)
        wait_for(lambda: scrape(http)["num_requests_waiting"] == 0)
        during = scrape(http)
        assert (during["num_requests_running"], during["num_requests_open"]) == (8, 1)
        assert during["prompt_tokens_total"] == before["prompt_tokens_total"], "the one that left was never computed"
        assert during[USED] >= held
    after = at_rest(http)
    assert after["requests_aborted_total reason=disconnect"] - before["requests_aborted_total reason=disconnect"] == 2


# -- U40: no tokens, no limit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_u40_no_tokens_with_echo_score_the_prompt(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": "score me", "max_tokens": 0, "echo": True, "logprobs": 1, "add_special_tokens": False}
    told = Told(http, body, stream=stream)
    parts = [each for each in told.logprobs[0] if each is not None]
    tokens = [token for part in parts for token in part["tokens"]]
    values = [value for part in parts for value in part["token_logprobs"]]
    assert (told.texts, told.ends[0][0], "".join(tokens)) == (["score me"], "length", "score me")
    assert values[0] is None and all(value < 0 and math.isfinite(value) for value in values[1:]) and len(values) == 8
    assert (told.usage["prompt_tokens"], told.usage["completion_tokens"]) == (8, 0)


def test_u40_minus_one_is_refused_and_null_is_no_limit_of_its_own(http: httpx.Client) -> None:
    assert error_of(http.post(TEXT, json={"prompt": "x", "max_tokens": -1}))["param"] == "max_tokens"
    told = Told(http, {"prompt": "x" * 1000, "max_tokens": None, "ignore_eos": True})
    assert (told.ends[0][0], told.usage["total_tokens"]) == ("length", 1024), "up to the model's length"
    assert Told(http, {"prompt": "<<a>>", "max_tokens": None}).texts == ["a"]


# -- U42, U44: texts in pieces -----------------------------------------------------------------------------------------

STOPS: Any = [
    (["END"], False, "abc", ("stop", "END"), 6),
    (["END"], True, "abcEND", ("stop", "END"), 6),
    (["E", "END"], False, "abc", ("stop", "E"), 4),
    (["E", "END"], True, "abcE", ("stop", "E"), 4),
    (["xyz!"], False, "abcENDxyz", ("length", None), 9),
]


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("stop", "include", "text", "end", "tokens"), STOPS)
def test_u42_a_stop_text_over_tokens(
    http: httpx.Client, path: str, stream: bool, stop: Any, include: bool, text: str, end: Any, tokens: int
) -> None:
    words = "<<abcENDxyz>>"
    asked = {"prompt": words} if path == TEXT else {"messages": [{"role": "user", "content": words}]}
    body = {**asked, "max_tokens": 9, "stop": stop, "include_stop_str_in_output": include}
    told = Told(http, body, path, stream=stream)
    assert (told.texts, told.ends, told.usage["completion_tokens"]) == ([text], {0: end}, tokens)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["\N{GRINNING FACE}", "漢", "č", "a\N{GRINNING FACE}漢č!"])
def test_u44_no_part_of_a_character_is_sent(http: httpx.Client, text: str, stream: bool) -> None:
    told = Told(http, {"prompt": f"<<{text}>>", "max_tokens": 40}, stream=stream)
    assert not any("\ufffd" in piece for piece in told.pieces[0])
    assert told.texts == [text]


@pytest.mark.parametrize("stream", [False, True])
def test_u44_an_answer_cut_within_a_character_ends_with_one_mark(http: httpx.Client, stream: bool) -> None:
    told = Told(http, {"prompt": "<<a\N{GRINNING FACE}>>", "max_tokens": 3}, stream=stream)
    assert (told.texts, told.ends) == (["a\ufffd"], {0: ("length", None)})
    assert not any("\ufffd" in piece for piece in told.pieces[0][:-1]), "it comes at the end alone"


# -- U46, U47, U50, U63: bad requests end for themselves ---------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["good", ""], [[65], []]])
def test_u46_an_empty_prompt_is_refused(http: httpx.Client, prompt: Any) -> None:
    assert error_of(http.post(TEXT, json={"prompt": prompt, "add_special_tokens": False}))["param"] == "prompt"


BAD_IDS: Any = [
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 5}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": [320]}, "prompt"),
    ({"prompt": [[65], [-1]]}, "prompt"),
    ({"stop_token_ids": [320]}, "stop_token_ids"),
    ({"allowed_token_ids": [320]}, "allowed_token_ids"),
]


@pytest.mark.parametrize(("given", "param"), BAD_IDS)
def test_u47_an_id_outside_the_vocabulary_is_refused(http: httpx.Client, given: Any, param: str) -> None:
    assert error_of(http.post(TEXT, json={"prompt": "x", **given}))["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_u50_one_prompt_too_long_is_one_error_for_the_whole_list(http: httpx.Client, stream: bool) -> None:
    body = {"prompt": ["short", "x" * 1100, "short"], "stream": stream}
    error = error_of(http.post(TEXT, json=body))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    told = Told(http, {"prompt": ["<<a>>", "<<b>>", "<<c>>"]}, stream=stream)
    assert told.texts == ["a", "b", "c"]


def test_u63_unknown_fields_are_logged_and_unsupported_ones_refused(server: Served, http: httpx.Client) -> None:
    headers = {"X-Request-Id": "typing-error"}
    assert http.post(TEXT, json={"prompt": "<<a>>", "temprature": 0.123}, headers=headers).json()["usage"]
    line = next(line for line in server.log.splitlines() if "temprature" in line)
    assert "typing-error" in line and "temperature" in line and "0.123" not in line
    for field, value in (("best_of", 3), ("suffix", "x"), ("use_beam_search", True)):
        error = error_of(http.post(TEXT, json={"prompt": "x", field: value}))
        assert error["param"] == field and field in error["message"]


# -- U49: one id for two -----------------------------------------------------------------------------------------------


def test_u49_two_requests_of_one_id_are_two(http: httpx.Client) -> None:
    headers = {"X-Request-Id": "same"}
    before = scrape(http)

    def post(text: str) -> str:
        body = {"prompt": f"{PACE} <<{text * 20}>>", "request_id": "same", "max_tokens": 30}
        answer = http.post(TEXT, json=body, headers=headers).raise_for_status()
        assert answer.headers["x-request-id"] == "same"
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(post, "a"), pool.submit(post, "b")
        wait_for(lambda: running(http) == 2)
        left = {"prompt": f"{PACE} leaving", "max_tokens": 900, "stream": True, "request_id": "same"}
        with http.stream("POST", TEXT, json=left, headers=headers) as answer:
            next(chunks := events(answer.iter_bytes()))
            chunks.close()
        assert (first.result(), second.result()) == ("a" * 20, "b" * 20)
    given_up(http, before, 900)


# -- U57: no infinities ------------------------------------------------------------------------------------------------

MASKED: Any = [
    {"temperature": 1.0, "top_k": 1, "seed": 1},
    {"temperature": 1.0, "logit_bias": {str(token): -100 for token in range(320) if token not in (65, 66)}},
    {"temperature": 1.0, "allowed_token_ids": [65, 66]},
    {"temperature": 0, "guided_choice": ["AB"]},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", MASKED)
def test_u57_log_probabilities_of_masked_tokens_are_finite(http: httpx.Client, given: Any, stream: bool) -> None:
    told = Told(http, {"prompt": "x", "max_tokens": 2, "logprobs": 5, **given}, stream=stream)
    values = [
        value
        for part in told.logprobs[0]
        for record in (part or {}).get("top_logprobs", [])
        for value in record.values()
    ]
    assert len(values) >= 10 and all(math.isfinite(value) for value in values)


# -- U61: counts in streams --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [TEXT, CHAT])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}, None])
def test_u61_usage_is_the_last_chunk_if_asked_for(http: httpx.Client, path: str, n: int, options: Any) -> None:
    asked = {"prompt": "<<ab>>"} if path == TEXT else {"messages": [{"role": "user", "content": "<<ab>>"}]}
    told = Told(http, {**asked, "n": n, "stream_options": options}, path, stream=True)
    assert told.texts == ["ab"] * n
    with_usage = [chunk for chunk in told.chunks if chunk.get("usage")]
    if options == {"include_usage": True}:
        assert with_usage == [told.chunks[-1]] and told.chunks[-1]["choices"] == []
        whole = Told(http, {**asked, "n": n}, path).usage
        assert whole["completion_tokens"] == 3 * n, "with the token that ends each"
        told.usage.pop("prompt_tokens_details"), whole.pop("prompt_tokens_details")
        assert told.usage == whole
    else:
        assert with_usage == [] and all(chunk["choices"] for chunk in told.chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_u61_an_answer_of_no_length_has_counts(http: httpx.Client, stream: bool) -> None:
    nothing = Told(http, {"prompt": "<<>>", "max_tokens": 5}, stream=stream)
    none = Told(http, {"prompt": "<<ab>>", "max_tokens": 0, "prompt_logprobs": 0}, stream=stream)
    assert (nothing.texts, nothing.usage["completion_tokens"], nothing.ends[0][0]) == ([""], 1, "stop")
    assert (none.texts, none.usage["completion_tokens"], none.ends[0][0]) == ([""], 0, "length")


# -- U64, U65: several at once -----------------------------------------------------------------------------------------


def test_u64_three_answers_share_a_prompt_and_a_seed_gives_them_again(http: httpx.Client) -> None:
    prompt = "a prompt of many blocks, " * 16
    body = {"prompt": prompt, "n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 8, "ignore_eos": True}
    whole, again, streamed = Told(http, body), Told(http, body), Told(http, body, stream=True)
    assert len(set(whole.texts)) == 3
    assert whole.texts == again.texts == streamed.texts
    assert [told.usage["prompt_tokens"] for told in (whole, again, streamed)] == [1 + len(prompt)] * 3
    assert whole.usage["completion_tokens"] == 24


def test_u64_blocks_of_a_prompt_are_held_once(http: httpx.Client) -> None:
    prompt = f"{PACE} " + "x" * 394  # with the token that begins it, 401 tokens
    body = {"prompt": prompt, "n": 3, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with http.stream("POST", TEXT, json=body) as answer:
        seen: set[int] = set()
        for chunk in (chunks := events(answer.iter_bytes())):
            seen |= {choice["index"] for choice in chunk["choices"]}
            if len(seen) == 3:
                break
        during = scrape(http)
        chunks.close()
    assert during["num_requests_running"] == 3
    assert 100 <= during[USED] < 200, "401 tokens fill 100 blocks, three times that if each had its own"


def test_u65_threads_get_what_one_after_the_other_gives(http: httpx.Client) -> None:
    bodies = [
        {"prompt": f"{number} {number % 7}", "temperature": 1.0, "seed": number, "max_tokens": 6, "ignore_eos": True}
        for number in range(40)
    ]
    serial = [Told(http, body).texts for body in bodies]
    barrier = threading.Barrier(4)

    def some(start: int) -> list[list[str]]:
        barrier.wait()
        return [Told(http, body, stream=bool(start % 2)).texts for body in bodies[start::4]]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(some, range(4)))
    assert found == [serial[start::4] for start in range(4)]
