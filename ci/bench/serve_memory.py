"""What requests leave behind in the server: memory of both processes after 1,000 and after 10,000 short ones.

    python ci/bench/serve_memory.py                         # a tiny model, made up; 10,000 requests
    python ci/bench/serve_memory.py --requests 200,2000     # a first look
    python ci/bench/serve_memory.py demo

Clients send the kinds of request below in turn: completions, streams, chats, streams whose
client leaves at its first news, and five kinds of error. The cache is small, so that its memory has all been written to
and prompts are evicted from its prefix cache long before the first reading. torch and oneDNN keep what they prepared
for a product of each number of rows, 1,024 of them each unless told otherwise: hundreds of MiB, all in use after some
ten thousand requests only. Here they keep few (--prepared). The tokenizer keeps the first 10,000 words that it
met: prompts are ids, all different, and conversations a hundred. So nothing but requests may add to memory between
readings: the difference over the requests in between is what each leaves behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from compare import _commit
from engines import NotMeasured
from models import ROOT
from serve_client import PATH, Connection, encoded
from serve_servers import HOST, NAME, Server, free_port, pagedkv

from pagedkv.api.errors import PagedKVError
from pagedkv.cli.bench import _batch_sizes
from pagedkv.cli.machine import machine
from pagedkv.cli.tables import print_table

_log = logging.getLogger("bench")

RESULTS = Path("bench-results/serve-memory.json")
CHAT = "/v1/chat/completions"
TINY = "tiny"
BLOCKS = 256
PREPARED = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""How many products torch and oneDNN keep prepared."""
SETTLE_SECONDS = 1.0
LEAVES_AFTER = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of request: what it says beside its prompt, the status it must get, whether its client leaves early."""

    name: str
    status: int = 200
    path: str = PATH
    body: Mapping[str, Any] = field(default_factory=dict)
    leaves: bool = False

    def content(self, number: int) -> dict[str, Any]:
        """The body of request `number`: ids that no other one has, or one of a hundred conversations."""
        if self.path == CHAT:
            prompt: dict[str, Any] = {"messages": [{"role": "user", "content": f"{number % 100}"}]}
        else:
            prompt = {"prompt": [int(digit) for digit in f"{number:06d}{number * 7919 % 1_000_003:06d}"]}
        return {"model": NAME, "max_tokens": 2, "temperature": 0, **prompt, **self.body}


KINDS = (
    Kind(name="completion"),
    Kind(name="stream", body={"stream": True}),
    Kind(name="chat", path=CHAT),
    Kind(name="chat stream", path=CHAT, body={"stream": True, "stream_options": {"include_usage": True}}),
    Kind(name="sampled, of two", body={"n": 2, "temperature": 1.0, "logprobs": 2}),
    Kind(name="leaves", body={"stream": True, "max_tokens": 100, "ignore_eos": True}, leaves=True),
    Kind(name="wrong type", body={"max_tokens": "many"}, status=400),
    Kind(name="out of range", body={"temperature": -1.0}, status=400),
    Kind(name="too long", body={"prompt": [1] * 300}, status=400),
    Kind(name="id of no token", body={"prompt": [10**6]}, status=400),
    Kind(name="unknown model", body={"model": "another"}, status=404),
)


async def send(port: int, numbers: Sequence[int], clients: int) -> Counter[str]:
    """Send the requests of these numbers; (kind -> how often). Raises `NotMeasured` for an unexpected status."""
    done: Counter[str] = Counter()
    left = iter(numbers)

    async def client() -> None:
        connection = Connection(HOST, port)
        for number in left:
            kind = KINDS[number % len(KINDS)]
            await _send(connection, kind, encoded(HOST, port, kind.path, kind.content(number)))
            done[kind.name] += 1
        connection.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return done


async def _send(connection: Connection, kind: Kind, request: bytes) -> None:
    if kind.leaves:
        await connection.start(request)
        await asyncio.wait_for(connection.news(), LEAVES_AFTER)
        connection.close()
        return
    reply = await connection.ask(request)
    if reply.status != kind.status:
        raise NotMeasured(f"{kind.name}: status {reply.status} instead of {kind.status}: {reply.body[:300]!r}")


def readings(server: Server, counts: Sequence[int], clients: int) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Resident bytes after so many requests in all, and how many there were of each kind."""
    found, kinds, sent = [{"requests": 0, **server.memory()}], Counter[str](), 0
    for count in counts:
        kinds += asyncio.run(_until(server.port, range(sent, count), clients))
        sent = count
        found.append({"requests": count, **server.memory()})
        told = (count, *(found[-1][part] / 2**20 for part in ("front", "engine")))
        _log.info("after %d requests: front %.1f MiB, engine %.1f MiB", *told)
    return found, kinds


async def _until(port: int, numbers: Sequence[int], clients: int) -> Counter[str]:
    done = await send(port, numbers, clients)
    await asyncio.sleep(SETTLE_SECONDS)  # the last clients that left are noticed
    return done


def grown(found: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Bytes a request between the last two readings."""
    before, after = found[-2], found[-1]
    requests = after["requests"] - before["requests"]
    return {part: (after[part] - before[part]) / requests for part in ("front", "engine")}


@click.command(context_settings={"token_normalize_func": lambda token: token.replace("_", "-")})
@click.argument("model", default=TINY)
@click.option("--requests", "counts", type=_batch_sizes, default="1000,10000", show_default=True)
@click.option("--clients", type=click.IntRange(min=1), default=16, show_default=True)
@click.option("--prepared", type=click.IntRange(min=0), default=16, show_default=True, help="Products kept prepared.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), default=RESULTS, show_default=True)
def main(model: str, counts: tuple[int, ...], clients: int, prepared: int, output: Path) -> None:
    """Measure the memory of the server of MODEL before and after many requests."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    _log.setLevel(logging.INFO)
    if len(counts) < 2 or list(counts) != sorted(set(counts)):
        raise click.UsageError("--requests needs two numbers or more, each above the one before, as in 1000,10000")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        found, kinds = _measure(model, counts, clients, prepared, output.parent)
    except (PagedKVError, NotMeasured) as error:
        raise click.ClickException(str(error)) from error
    described = {**machine(), "date": datetime.date.today().isoformat(), "commit": _commit()}
    report = {
        "machine": described,
        "model": model,
        "clients": clients,
        "prepared": prepared,
        "kinds": kinds,
        "readings": found,
    }
    output.write_text(json.dumps({**report, "grown": grown(found)}, indent=1) + "\n", encoding="utf-8")
    _log.info("written to %s", output)
    _show(found)


def _measure(
    model: str, counts: Sequence[int], clients: int, prepared: int, logs: Path
) -> tuple[list[dict[str, Any]], Counter[str]]:
    settings = {"backend": "cpu", "max_model_len": 256, "num_blocks": BLOCKS, "block_size": 16}
    with tempfile.TemporaryDirectory() as home:
        name = _tiny(Path(home)) if model == TINY else model
        port = free_port()
        plan = dataclasses.replace(pagedkv(name, settings, port), environment={v: str(prepared) for v in PREPARED})
        with Server("pagedkv", plan, port, 1, logs / "serve-memory.log") as server:
            return readings(server, counts, clients)


def _tiny(home: Path) -> str:
    sys.path.append(str(ROOT))
    from tests.helpers.tiny_models import tiny_model

    return str(tiny_model(home))


def _show(found: Sequence[Mapping[str, int]]) -> None:
    rows = [[f"{each['requests']:,}", *(f"{each[part] / 2**20:.1f}" for part in ("front", "engine"))] for each in found]
    click.echo("\nResident memory after so many requests, MiB")
    print_table(["requests", "front", "engine"], rows)
    between = f"{found[-2]['requests']:,} and {found[-1]['requests']:,}"
    told = ", ".join(f"{part} {count:+.0f}" for part, count in grown(found).items())
    click.echo(f"\nBytes a request between {between}: {told}")


if __name__ == "__main__":
    main()
