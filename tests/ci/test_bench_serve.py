"""The measurement of the server: clients, figures, rounds and tables, on a server that is made up; and memory."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from contextlib import contextmanager

import psutil
import pytest
import serve
import serve_client
import serve_memory
import serve_report
import serve_servers
from click.testing import CliRunner
from engines import Child, NotMeasured
from serve import Level, Rounds
from serve_client import Connection, Reply, answered, asked, encoded
from serve_engine import Feed
from serve_figures import Answered, figures

from pagedkv import LLM
from pagedkv.cli.standard_work import Work
from tests.helpers.engine_rig import SETTINGS, folder


def test_figures_by_hand():
    answers = [
        Answered(sent=10.0, ended=16.0, news=[11.0, 13.0, 16.0], tokens=3),
        Answered(sent=12.0, ended=20.0, news=[15.0, 16.0, 20.0], tokens=3),
    ]
    found = figures(answers)
    # From 10 to 20. First tokens after 1 and 3; gaps 2, 3, 1, 4; requests of 6 and 8. p99 lies 0.99 of the way on.
    assert (found["seconds"], found["requests_per_second"], found["tokens_per_second"]) == (10.0, 0.2, 0.6)
    assert found["time_to_first_token_p50"] == 2.0 and found["time_to_first_token_p99"] == pytest.approx(2.98)
    assert found["time_between_tokens_p50"] == 2.5 and found["time_between_tokens_p99"] == pytest.approx(3.97)
    assert found["time_of_request_p50"] == 7.0


def test_whole_answers_have_no_first_token():
    found = figures([Answered(sent=0.0, ended=2.0, news=[], tokens=4)])
    assert found["time_to_first_token_p50"] is None and found["time_between_tokens_p99"] is None
    assert found["tokens_per_second"] == 2.0


def reply(*parts, status=200):
    return Reply(0.5, status, parts[-1][0], list(parts))


def test_events_have_the_moment_of_their_last_byte():
    parts = [
        (1.0, b'data: {"a": 1}\n'),
        (2.0, b'\ndata: {"b'),
        (3.0, b'": 2}\r\n\r\n: ping\n\n'),
        (4.0, b"data: [DONE]\n\n"),
    ]
    assert list(reply(*parts).events()) == [(1.0, b'{"a": 1}'), (3.0, b'{"b": 2}'), (4.0, b"[DONE]")]


def chunk(text, end=None):
    return b"data: " + json.dumps({"choices": [{"text": text, "finish_reason": end}]}).encode() + b"\n\n"


def test_news_are_events_with_a_choice_and_usage_counts_the_tokens():
    usage = b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\n'
    came = reply((1.0, chunk("a")), (2.0, chunk("b") + chunk("c", "length")), (3.0, usage + b"data: [DONE]\n\n"))
    assert answered(came, True, 5) == Answered(sent=0.5, ended=3.0, news=[1.0, 2.0, 2.0], tokens=5)


def test_without_usage_a_reached_limit_is_the_count():
    came = reply((1.0, chunk("a")), (2.0, chunk("b", "length") + b"data: [DONE]\n\n"))
    assert answered(came, True, 7).tokens == 7


@pytest.mark.parametrize(
    ("came", "stream", "why"),
    [
        (reply((1.0, b"no")), False, "answered 500: no"),
        (reply((1.0, b'data: {"error": {"message": "gone"}}\n\n')), True, "ended a stream: {'message': 'gone'}"),
        (reply((1.0, chunk("a", "stop"))), True, "0 tokens came instead of 7"),
        (reply((1.0, b'{"choices": [], "usage": {"completion_tokens": 6}}')), False, "6 tokens came instead of 7"),
    ],
)
def test_what_is_no_whole_answer_ends_the_clients(came, stream, why):
    came.status = 500 if "500" in why else 200
    with pytest.raises(SystemExit, match=why.replace("{", r"\{")):
        answered(came, stream, 7)


class FakeServer:
    """Answers completions in a thread: `max_tokens` events, or one object; writes down what came, how many at once."""

    def __init__(self):
        self.bodies, self.most, self._open = [], 0, 0
        self._started, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self):
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self):
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()

    async def _serve(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await self._answer(json.loads(await reader.readexactly(length)), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _answer(self, body, writer):
        self.bodies.append(body)
        self._open += 1
        self.most = max(self.most, self._open)
        await asyncio.sleep(0.02)
        self._open -= 1
        count = body["max_tokens"] - (body["prompt"] == "short")
        if not body["stream"]:
            text = json.dumps(
                {"choices": [{"finish_reason": "length"}], "usage": {"completion_tokens": count}}
            ).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(text), text))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        events = [chunk("x", "length" if left == 1 else None) for left in range(count, 0, -1)]
        for event in [*events, b"data: [DONE]\n\n"]:
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")


def test_so_many_clients_ask_at_once_and_each_goes_on_when_it_is_answered():
    with FakeServer() as server:
        requests = [encoded("127.0.0.1", server.port, "/v1/completions", body(number)) for number in range(7)]
        replies = asyncio.run(asked("127.0.0.1", server.port, requests, 3))
    assert server.most == 3 and [each["prompt"] for each in server.bodies] == [[number] for number in range(7)]
    assert [answered(each, True, 4).tokens for each in replies] == [4] * 7
    assert all(len(answered(each, True, 4).news) == 4 for each in replies)


def body(number):
    return {"prompt": [number], "max_tokens": 4, "stream": True}


@contextmanager
def clients_of(port, tmp_path, first=(1,)):
    told = json.dumps({"host": "127.0.0.1", "port": port, "body": {"model": "m"}, "threads": 1})
    command = [sys.executable, serve_client.__file__, told]
    with Child("clients", command, 1, list(first), tmp_path / "clients.log") as clients:
        yield clients


def test_the_clients_are_a_process_of_their_own_and_say_what_they_cost(tmp_path):
    with FakeServer() as server, clients_of(server.port, tmp_path) as clients:
        streamed = clients.run([[1, 2], [3], "text"], 5, clients=2, stream=True)
        whole = clients.run([[4]], 5)
    assert (streamed["requests"], streamed["output_tokens"], whole["output_tokens"]) == (3, 15, 5)
    assert streamed["time_to_first_token_p50"] >= 0.02 and whole["time_to_first_token_p50"] is None
    assert 0 <= streamed["cpu"]["clients"] < streamed["seconds"] + 1
    assert [each["prompt"] for each in server.bodies] == [[1], [1, 2], [3], "text", [4]]
    assert server.bodies[1]["stream_options"] == {"include_usage": True} and "stream_options" not in server.bodies[4]
    assert {each["model"] for each in server.bodies} == {"m"}


def test_a_short_answer_is_not_measured(tmp_path):
    came_short = pytest.raises(NotMeasured, match="4 tokens came instead of 5")
    with FakeServer() as server, clients_of(server.port, tmp_path) as clients, came_short:
        clients.run(["short"], 5)


def test_a_server_that_is_not_there_is_named(tmp_path):
    with pytest.raises(NotMeasured, match="does not answer"), clients_of(serve_servers.free_port(), tmp_path):
        pass


def test_a_client_that_leaves_hangs_up():
    async def leave(port):
        connection = Connection("127.0.0.1", port)
        await connection.start(encoded("127.0.0.1", port, "/v1/completions", body(1)))
        await connection.news()
        connection.close()
        return await connection.ask(encoded("127.0.0.1", port, "/v1/completions", body(2)))

    with FakeServer() as server:
        came = asyncio.run(leave(server.port))
    assert answered(came, True, 4).tokens == 4, "a new connection is made for the next request"


@pytest.mark.parametrize("stream", [True, False])
def test_the_engine_alone_has_so_many_requests_at_once(stream):
    with LLM(folder(), **SETTINGS) as llm:
        prompts = [[number, number + 1] for number in range(1, 8)]
        added, most = [], []
        add, step = llm.engine.add_request, llm.engine.step
        llm.engine.add_request = lambda *given, **how: added.append(given[0]) or add(*given, **how)
        llm.engine.step = lambda: most.append(llm.metrics().running + llm.metrics().waiting) or step()
        answers = Feed(llm.engine, prompts, 3, stream).run(3)
    assert [each["prompt_token_ids"] for each in added] == prompts
    assert max(most) == 3 and [each.tokens for each in answers] == [3] * 7
    assert {len(each.news) for each in answers} == {3 if stream else 0}


@pytest.mark.parametrize(("clients", "requests"), [(1, 4), (8, 16), (32, 64), (64, 128), (128, 128), (200, 200)])
def test_requests_of_a_level(clients, requests):
    assert Level(clients=clients, mode="stream").requests == requests


class Fake:
    """One of fixed speeds, which writes down who was asked what."""

    def __init__(self, name, speeds, log, fails=False):
        self.name, self._speeds, self._log, self._fails = name, list(speeds), log, fails

    def run(self, prompts, output_len, **how):
        if self._fails:
            raise NotMeasured("it broke")
        self._log.append((self.name, prompts, output_len, how))
        speed = self._speeds.pop(0) if output_len > 4 else 1.0
        answers = [Answered(sent=0.0, ended=1.0, news=[0.25, 0.75] if how["stream"] else [], tokens=1)]
        return {**figures(answers), "tokens_per_second": speed, "cpu": {"engine": 0.5}}


LEVELS = [Level(clients=2, mode="stream"), Level(clients=2, mode="whole")]


def rounds_of(*fakes):
    measured = Rounds(fakes, LEVELS, Work(input_len=3, output_len=8, seed=3), 50)
    measured.warm_up()
    measured.measure(2, float("inf"))
    return measured


def test_rounds_are_interleaved_and_all_get_the_same_prompts():
    log = []
    rounds_of(*(Fake(name, [1.0] * 4, log) for name in ("engine", "server")))
    warm, runs = log[:4], log[4:]
    assert [(name, len(prompts), count) for name, prompts, count, _ in warm] == [
        (name, 2, 4) for name in ("engine", "engine", "server", "server")
    ]
    assert [name for name, *_ in runs] == ["server", "engine", "engine", "server"] * 2
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        assert first[1:] == second[1:] and len(first[1]) == 4
    assert [how for *_, how in runs[::2]] == [{"clients": 2, "stream": stream} for stream in (True, False)] * 2


def test_ratios_are_taken_within_a_round():
    engine, server = Fake("engine", [10.0, 20.0, 40.0, 20.0], []), Fake("server", [9.0, 20.0, 30.0, 20.0], [])
    row = rounds_of(engine, server).row(LEVELS[0])
    assert row["ratio"] == {"engine": pytest.approx((9 / 10 + 30 / 40) / 2)}
    assert row["cores"]["server"]["engine"] == {"median": 0.5, "min": 0.5, "max": 0.5}


def test_a_peer_that_fails_leaves_and_ours_may_not():
    measured = rounds_of(Fake("server", [2.0] * 4, []), Fake("vllm", [], [], fails=True))
    assert measured.names == ["server"] and measured.failed == {"vllm": "it broke"}
    with pytest.raises(NotMeasured, match="it broke"):
        rounds_of(Fake("server", [], [], fails=True))


def test_no_round_begins_after_the_time_limit(caplog):
    measured = Rounds([Fake("server", [1.0] * 9, [])], LEVELS, Work(input_len=3, output_len=8), 50)
    measured.measure(3, 0.0)
    assert measured.done == 1 and "stopped after 1 of 3 rounds" in caplog.text


def test_the_tables_as_markdown(tmp_path):
    measured = rounds_of(Fake("server", [30.0] * 4, []), Fake("llama_cpp", [20.0] * 4, []))
    report = {
        "machine": {
            "date": "2026-01-31",
            "processor": "P 1",
            "memory": 2**33,
            "system": "Linux",
            "torch": "2.13.0",
            "pagedkv": "0.1.0",
        },
        "model": "demo",
        "threads": 2,
        "work": {"output_len": 8, "rounds": measured.done},
        "names": measured.names,
        "engines": {"server": {"load_seconds": 1.25}, "llama_cpp": {"load_seconds": 2.5, "prompt": "text"}},
        "not_measured": {"vllm": "there is no environment"},
        "rows": [measured.row(level) for level in LEVELS],
    }
    path = tmp_path / "serve.json"
    path.write_text(json.dumps(report))
    text = CliRunner().invoke(serve_report.main, [str(path)]).output
    assert "2 interleaved rounds, median (least..most)." in text
    assert "| 2 | stream | 30.0 (30.0..30.0) | 20.0 (20.0..20.0), **1.500x** |" in text
    assert "| 2 | stream | 4 | 1.00 | 1.00 |" in text
    assert "| 2 | 250.0, 250.0 / 500.0, 500.0 |" in text
    assert "| 2 | 1000.0, 1000.0 |" in text and "| 2 | whole | engine 0.500 | engine 0.500 |" in text
    assert "| llama_cpp | 2.5 | text |" in text and "| vllm | - | not measured here: there is no environment |" in text
    for each in serve_report.tables(report):
        assert {len(each.columns)} == {len(row) for row in each.rows}


def test_options_become_flags_and_every_setting_is_given():
    plan = serve_servers.pagedkv("M", {"backend_options": {"threads": 2}, "enable_prefix_caching": False, "n": 3}, 9)
    assert plan.command[1:] == [
        *("-m", "pagedkv.entrypoints.api_server", "--model", "M", "--host", "127.0.0.1", "--port", "9"),
        *("--served-model-name", "bench", "--backend-option=threads=2", "--no-enable-prefix-caching", "--n=3"),
    ]


def test_peers_without_a_server_and_unknown_modes_are_refused():
    for given, message in ((["--peers", "openvino"], "'openvino' has no server here"), (["--modes", "both"], "'both'")):
        result = CliRunner().invoke(serve.main, ["demo", *given])
        assert result.exit_code == 2 and message in result.output


def test_a_server_that_does_not_start_says_why(tmp_path):
    plan = serve_servers.Plan(command=[sys.executable, "-c", "raise SystemExit('no model')"])
    with pytest.raises(NotMeasured, match="late's server ended with code 1: no model"):
        serve_servers.Server("late", plan, 1, 1, tmp_path / "log")


def test_a_process_and_what_it_started_are_ended(tmp_path):
    child = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'http.server', *sys.argv[1:]])"
    port = serve_servers.free_port()
    command = [sys.executable, "-c", child, str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with serve_servers.Server("two", serve_servers.Plan(command=command, health="/"), port, 1, tmp_path / "log") as two:
        processes = two.processes()
        assert len(processes["front"]) == 1 == len(processes["engine"])
        assert set(two.memory()) == {"front", "engine"} and all(size > 2**20 for size in two.memory().values())
        assert all(seconds > 0 for seconds in two.cpu().values())
    _, alive = psutil.wait_procs([*processes["front"], *processes["engine"]], 10)
    assert all(each.status() == psutil.STATUS_ZOMBIE for each in alive), "at most nobody has asked how it ended"


def test_memory_is_the_difference_over_the_requests_in_between():
    found = [{"requests": 10, "front": 100, "engine": 1000}, {"requests": 30, "front": 140, "engine": 900}]
    assert serve_memory.grown(found) == {"front": 2.0, "engine": -5.0}


def test_no_two_completions_have_the_same_prompt():
    prompts = {tuple(serve_memory.KINDS[0].content(number)["prompt"]) for number in range(20_000)}
    assert len(prompts) == 20_000 and {len(prompt) for prompt in prompts} == {12}


def test_the_memory_of_a_real_server_under_all_kinds_of_requests(tmp_path):
    settings = {**SETTINGS, "num_blocks": 64, "block_size": 16}
    port = serve_servers.free_port()
    plan = serve_servers.pagedkv(str(folder()), settings, port)
    kinds = len(serve_memory.KINDS)
    with serve_servers.Server("pagedkv", plan, port, 1, tmp_path / "log") as server:
        found, counted = serve_memory.readings(server, (kinds, 2 * kinds), 2)
    assert [each["requests"] for each in found] == [0, kinds, 2 * kinds]
    assert counted == {kind.name: 2 for kind in serve_memory.KINDS}
    assert all(each["front"] > 2**20 and each["engine"] > 2**20 for each in found)


def test_readings_go_up():
    result = CliRunner().invoke(serve_memory.main, ["--requests", "9,3"])
    assert result.exit_code == 2 and "--requests needs two numbers or more" in result.output
