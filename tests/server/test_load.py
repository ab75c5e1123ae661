"""Many clients at once, half of whom leave: each answer is the engine's own, and nothing stays (U37, U66, U67)."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pagedkv import LLM, SamplingParams
from tests.helpers.server_rig import PACE, Served, at_rest, events, served, settings_of, split_events

TEXT = "/v1/completions"
CLIENTS = 200
SMALL: dict[str, Any] = {"num_blocks": 49, "max_model_len": 128}
"""So few blocks that sequences have to stop for others."""


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """The last test ends it."""
    with served(SMALL, restart_engine=1) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def some_bodies(count: int, rng: random.Random) -> list[dict[str, Any]]:
    """Requests of mixed lengths, seeds and numbers of answers, streams and not; some share how they begin."""
    return [
        {
            "prompt": rng.choice(["", "the same beginning of many "])
            + "".join(rng.choices("abc ", k=rng.randint(1, 60))),
            "max_tokens": rng.randint(1, 24),
            "n": rng.choice([1, 1, 1, 2, 3]),
            "seed": rng.randrange(1000),
            "temperature": rng.choice([0.7, 1.0]),
            "ignore_eos": rng.random() < 0.5,
            "stream": rng.random() < 0.5,
        }
        for _ in range(count)
    ]


Answer = list[tuple[str, str | None]]
"""Text and reason of each choice."""


def expected(bodies: list[dict[str, Any]]) -> list[Answer]:
    """What the engine gives in this process, with room for all."""
    names = ("max_tokens", "n", "seed", "temperature", "ignore_eos")
    params = [SamplingParams(**{name: body[name] for name in names}) for body in bodies]
    with LLM(**settings_of()) as llm:
        outputs = llm.generate([body["prompt"] for body in bodies], params, use_tqdm=False)
    return [[(choice.text, choice.finish_reason) for choice in output.outputs] for output in outputs]


def whole(reply: httpx.Response) -> Answer:
    """The choices of an answer in one piece."""
    return [(choice["text"], choice["finish_reason"]) for choice in reply.json()["choices"]]


def read(chunks: list[Any], n: int) -> Answer:
    """A stream's choices."""
    assert chunks[-1] == "[DONE]"
    news = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    each = [[choice for choice in news if choice["index"] == index] for index in range(n)]
    return [("".join(choice["text"] for choice in part), part[-1]["finish_reason"]) for part in each]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None = None) -> Answer | None:
    """A whole answer, or None for a client that left after so many parts of a stream, or hundredths of a second."""
    if not body["stream"]:
        patience = None if leave_after is None else leave_after / 100
        try:
            reply = await asyncio.wait_for(client.post(TEXT, json=body), patience)
        except asyncio.TimeoutError:
            return None
        assert reply.status_code == 200, reply.text
        return whole(reply)
    async with client.stream("POST", TEXT, json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        data = b""
        parts = 0
        async for more in answer.aiter_bytes():
            data += more
            parts += 1
            if parts == leave_after:
                return None
    return read(split_events(data), body["n"])


async def ask_or_fail(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer | str:
    """A whole answer, or the code of the error that came in its place or ended it."""
    reply = await client.post(TEXT, json=body)
    if reply.status_code != 200:
        assert reply.status_code == 503, reply.text
        return str(reply.json()["error"]["code"])
    if not body["stream"]:
        return whole(reply)
    chunks = split_events(reply.content)
    return read(chunks, body["n"]) if chunks[-1] == "[DONE]" else str(chunks[-1]["error"]["code"])


def many(server: Served) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits)


def test_u37_half_of_200_clients_leave_and_the_others_get_the_engines_own_answers(
    server: Served, http: httpx.Client
) -> None:
    rng = random.Random(11)
    bodies = some_bodies(CLIENTS, rng)
    patience = [rng.randint(1, 12) if number % 2 else None for number in range(CLIENTS)]

    async def all_at_once() -> list[Answer | None]:
        async with many(server) as client:
            return await asyncio.gather(*(ask(client, *each) for each in zip(bodies, patience, strict=True)))

    found = asyncio.run(all_at_once())
    after = at_rest(http)
    right = expected(bodies)
    complete = [number for number, answer in enumerate(found) if answer is not None]
    assert set(range(0, CLIENTS, 2)) <= set(complete), "nobody who stayed was left without an answer"
    assert [found[number] for number in complete] == [right[number] for number in complete]
    left = CLIENTS - len(complete)
    assert left > CLIENTS // 8, "enough of those who meant to leave did so in time"
    assert 0 < after["requests_aborted_total reason=disconnect"] <= left
    assert not {name: value for name, value in after.items() if name.startswith("request_errors_total") and value}
    others = ("timeout", "shutdown", "client", "other")
    assert not any(after[f"requests_aborted_total reason={reason}"] for reason in others)
    assert after["num_preemptions_total"] > 0, "there were more sequences than blocks"
    assert "ERROR" not in server.log and "Traceback" not in server.log


def test_u66_an_engine_killed_under_load_leaves_no_client_without_a_word(server: Served, http: httpx.Client) -> None:
    rng = random.Random(12)
    bodies = some_bodies(24, rng)
    for body in bodies:
        body["prompt"] = f"{PACE} {body['prompt']}"
    first = server.engine()

    async def with_a_kill() -> list[Answer | str]:
        async with many(server) as client:
            asking = [asyncio.create_task(ask_or_fail(client, body)) for body in bodies]
            while sum(task.done() for task in asking) < 5:
                await asyncio.sleep(0.01)
            first.send_signal(signal.SIGKILL)
            return await asyncio.gather(*asking)

    found = asyncio.run(with_a_kill())
    failed = [number for number, answer in enumerate(found) if isinstance(answer, str)]
    assert {found[number] for number in failed} <= {"engine_dead", "engine_starting"}
    assert 0 < len(failed) < len(bodies)
    for _ in range(1200):
        if http.get("/health").status_code == 200:
            break
        time.sleep(0.05)
    assert server.engine() != first

    async def again() -> list[Answer | None]:
        async with many(server) as client:
            return await asyncio.gather(*(ask(client, body) for body in bodies))

    right = expected(bodies)
    assert asyncio.run(again()) == right
    assert all(found[number] == right[number] for number in range(len(bodies)) if number not in failed)
    after = at_rest(http)
    failures = sum(after[f"request_errors_total kind={kind}"] for kind in ("engine_dead", "engine_starting"))
    assert failures == len(failed), "probes are no errors"
    assert after["engine_restarts_total"] == after["engine_up"] == 1


def test_u67_a_front_that_is_killed_takes_its_engine_with_it(server: Served, http: httpx.Client) -> None:
    server.engine()
    body = {"prompt": f"{PACE} long", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with http.stream("POST", TEXT, json=body) as answer:
        next(chunks := events(answer.iter_bytes()))
        server.signal(signal.SIGKILL)
        assert server.ended() == -signal.SIGKILL
        with pytest.raises(httpx.TransportError):
            list(chunks)
