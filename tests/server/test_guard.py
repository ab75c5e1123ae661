"""What a request passes before any endpoint sees it: driven as ASGI, and over sockets through uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.api.errors import ConfigError
from pagedkv.server.guard import guarded
from pagedkv.server.keys import Keys
from pagedkv.server.run import serve
from pagedkv.server.settings import ServerConfig

KEY = "sk-alice-0123456789"
LOCAL = ("host", "localhost:8000")
JSON = ("content-type", "application/json")
AUTH = ("authorization", f"Bearer {KEY}")


PAGE = "https://chat.example:8443"
WIDE = {"host": "0.0.0.0"}


def guard(app, keys=None, body_timeout=60.0, **settings):
    return guarded(app, ServerConfig(**settings), keys or Keys(), body_timeout=body_timeout)


class App:
    """Reads a body, says how long it is, and remembers how it was called."""

    def __init__(self):
        self.calls = []

    async def __call__(self, scope, receive, send):
        body, more = b"", scope["type"] == "http"
        while more:
            message = await receive()
            assert message["type"] == "http.request"
            body, more = body + message["body"], message["more_body"]
        self.calls.append(SimpleNamespace(scope=scope, body=body, state=scope.get("state")))
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"the app's own")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": str(len(body)).encode()})


class Asked:
    """One request through a guard: its answer, and how many messages of its body were taken."""

    def __init__(self, app, method, path, headers, parts, **scope):
        parts = [
            {"type": "http.request", "body": part, "more_body": number < len(parts) - 1}
            for number, part in enumerate(parts)
        ]
        self.taken, self.sent = 0, []

        async def receive():
            await asyncio.sleep(0)
            self.taken += 1
            return parts[self.taken - 1]

        async def send(message):
            self.sent.append(message)

        head = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
        scope = {"type": "http", "method": method, "path": path, "headers": head, **scope}
        asyncio.run(app(scope, receive, send))

    @property
    def status(self):
        return self.sent[0]["status"]

    @property
    def headers(self):
        return httpx.Headers(self.sent[0]["headers"])

    @property
    def error(self):
        assert self.headers["content-type"] == "application/json"
        error = json.loads(b"".join(message["body"] for message in self.sent[1:]))["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return error


@pytest.fixture
def app():
    return App()


@pytest.fixture
def ask(app):
    """Ask a guard with the given settings around `app`; what a test does not name is fine."""

    def ask(headers=(LOCAL, JSON), method="POST", path="/v1/completions", parts=(b"{}",), scope=(), **settings):
        return Asked(guard(app, **settings), method, path, headers, parts, **dict(scope))

    return ask


def refused(asked, app, status, code):
    assert (asked.status, asked.error["code"]) == (status, code)
    assert app.calls == [] and asked.headers["x-request-id"]
    return asked


# -- Host --------------------------------------------------------------------------------------------------------------

LOCALS = [
    "localhost",
    "localhost:8000",
    "LocalHost:80",
    "localhost.",
    "localhost.:8000",
    "a.localhost",
    "127.0.0.1:8000",
    "127.255.255.254",
    "[::1]",
    "[::1]:8000",
    "[0:0:0:0:0:0:0:1]:8000",
    "localhost:",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "notlocalhost",
    "128.0.0.1",
    "0.0.0.0:8000",
    "192.168.1.7",
    "[::]",
    "[fe80::1]:8000",
    "127.1",
    "0177.0.0.1",
]
MALFORMED = ["", "localhost:8000:1", "localhost@evil.example", "localhost/x", "local host", "::1", "[::1", "localhöst"]


@pytest.mark.parametrize("host", LOCALS)
def test_on_loopback_this_machines_own_names_are_answered(ask, host):
    assert ask([("host", host), JSON]).status == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_on_loopback_a_foreign_host_is_refused(ask, app, host):
    asked = refused(ask([("host", host), JSON]), app, 421, "foreign_host")
    assert "--allowed-host" in asked.error["message"] and asked.taken == 0


@pytest.mark.parametrize("host", MALFORMED)
def test_on_loopback_a_host_that_is_no_name_is_refused(ask, app, host):
    refused(ask([("host", host), JSON]), app, 400, "invalid_host")


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"], ["localhost", "evil.example"]])
@pytest.mark.parametrize("settings", [{}, WIDE, {"allowed_hosts": ["*"]}])
def test_one_host_is_needed_everywhere(ask, app, hosts, settings):
    refused(ask([*(("host", host) for host in hosts), JSON], **settings), app, 400, "invalid_host")


@pytest.mark.parametrize("listens", [{}, WIDE])
def test_hosts_that_are_allowed_are_answered_beside_local_ones(ask, listens):
    allowed = ["API.Example.", "*.inner.example", "10.0.0.7", "[FD00:0::1]"]
    ask_of = {host: ask([("host", host), JSON], allowed_hosts=allowed, **listens).status for host in FOREIGN}
    assert set(ask_of.values()) == {421}
    for host in ("api.example", "api.example:99", "a.b.inner.example", "10.0.0.7:8000", "[fd00::1]:8000", "localhost"):
        assert ask([("host", host), JSON], allowed_hosts=allowed, **listens).status == 200
    for host in ("x.api.example", "inner.example", "xinner.example", "10.0.0.70", "[fd00::2]"):
        assert ask([("host", host), JSON], allowed_hosts=allowed, **listens).status == 421


@pytest.mark.parametrize("settings", [WIDE, {"host": "::"}, {"allowed_hosts": ["*"]}])
def test_bound_wider_or_with_every_host_allowed_no_name_is_refused(ask, settings):
    assert {ask([("host", host), JSON], **settings).status for host in FOREIGN} == {200}


@pytest.mark.parametrize("host", ["", "http://x.example", "x.example:80", "x.example/", "*x.example", "a b", "*."])
def test_a_host_that_no_request_could_match_is_refused_at_the_start(app, host):
    with pytest.raises(ConfigError, match=re.escape(f"allowed host {host!r}: give a name or an address without port")):
        guard(app, allowed_hosts=[host])


# -- keys --------------------------------------------------------------------------------------------------------------


def test_with_a_key_the_tenant_is_its_owner(ask, app):
    keys = Keys([KEY])
    assert ask([LOCAL, JSON, AUTH], keys=keys).status == 200
    assert app.calls[0].state["tenant"] == keys.find(AUTH[1].encode())


@pytest.mark.parametrize("headers", [[], [AUTH], [("authorization", "Basic x")]])
def test_without_keys_any_authorization_is_accepted(ask, app, headers):
    assert ask([LOCAL, JSON, *headers]).status == 200
    assert app.calls[0].state["tenant"].name == "anonymous"


@pytest.mark.parametrize(
    "path", ["/v1/models", "/metrics", "/ready", "/version", "/docs", "/", "/health/", "/HEALTH", "/x"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE", "HEAD"])
def test_with_keys_everything_but_health_needs_one(ask, app, path, method):
    asked = refused(ask([LOCAL, JSON], method, path, keys=Keys([KEY])), app, 401, "invalid_api_key")
    assert asked.error["type"] == "authentication_error" and asked.taken == 0
    assert asked.headers["www-authenticate"] == 'Bearer realm="pagedkv"'


def test_health_needs_no_key(ask, app):
    assert ask([LOCAL], "GET", "/health", keys=Keys([KEY])).status == 200
    assert "tenant" not in app.calls[0].state
    assert ask([LOCAL], "GET", "/api/health", keys=Keys([KEY]), scope={"root_path": "/api"}).status == 200
    assert ask([LOCAL], "GET", "/api/metrics", keys=Keys([KEY]), scope={"root_path": "/api"}).status == 401
    assert ask([LOCAL, JSON], "POST", "/health", keys=Keys([KEY])).status == 401


@pytest.mark.parametrize("given", [["Bearer wrong-0123456789"], [f"Basic {KEY}"], [AUTH[1], AUTH[1]], [""]])
def test_a_wrong_key_costs_no_body_and_is_not_shown(ask, app, caplog, given):
    caplog.set_level(logging.DEBUG)
    headers = [LOCAL, ("content-type", "text/plain"), *(("authorization", value) for value in given)]
    asked = refused(
        ask(headers, keys=Keys([KEY]), parts=[b"x" * 100] * 3, max_body_size=10), app, 401, "invalid_api_key"
    )
    assert asked.taken == 0 and asked.headers["www-authenticate"] == 'Bearer realm="pagedkv", error="invalid_token"'
    assert "wrong-0123456789" not in json.dumps(asked.error) + caplog.text


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "application/json",
        "Application/JSON",
        "application/json; charset=utf-8",
        'application/json;charset="UTF-8"',
        "application/json ; charset=utf8",
    ],
)
def test_json_in_utf8_is_taken(ask, app, value):
    assert ask([LOCAL, ("content-type", value)]).status == 200 and app.calls[0].body == b"{}"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "QUERY"])
@pytest.mark.parametrize(
    "types",
    [
        [],
        [""],
        ["text/plain"],
        ["multipart/form-data; boundary=x"],
        ["application/x-www-form-urlencoded"],
        ["application/json; charset=latin-1"],
        ["application/json; charset=utf-8; x=y"],
        ["application/jsonp"],
        ["text/plain; application/json"],
        ["application/json, text/plain"],
        ["application/json", "text/plain"],
    ],
)
def test_anything_else_is_not_read(ask, app, method, types):
    asked = ask([LOCAL, *(("content-type", one) for one in types)], method)
    assert refused(asked, app, 415, "unsupported_media_type").taken == 0
    assert asked.headers["accept"] == "application/json"


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip", ""])
def test_an_encoded_body_is_not_read(ask, app, coding):
    asked = refused(ask([LOCAL, JSON, ("content-encoding", coding)]), app, 415, "unsupported_encoding")
    assert asked.headers["accept-encoding"] == "identity" and asked.taken == 0
    assert ask([LOCAL, JSON, ("content-encoding", "Identity")]).status == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
def test_what_has_no_body_needs_no_type(ask, app, method):
    assert ask([LOCAL], method, parts=[b""]).status == 200


@pytest.mark.parametrize(("parts", "status"), [([b"x" * 10], 200), ([b"x" * 11], 413), ([b"12345", b"67890"], 200)])
def test_a_body_may_be_as_long_as_the_limit(ask, app, parts, status):
    asked = ask(parts=parts, max_body_size=10)
    assert asked.status == status and len(app.calls) == (status == 200)
    assert status != 200 or app.calls[0].body == b"".join(parts)


def test_a_body_that_grows_over_the_limit_is_read_no_further(ask, app):
    asked = refused(ask(parts=[b"x" * 6, b"x" * 6, b"x" * 6], max_body_size=10), app, 413, "body_too_large")
    assert asked.taken == 2 and asked.headers["connection"] == "close"
    assert "10 bytes" in asked.error["message"] and "--max-body-size" in asked.error["message"]


def test_a_length_over_the_limit_is_refused_unread(ask, app):
    asked = refused(ask([LOCAL, JSON, ("content-length", "11")], max_body_size=10), app, 413, "body_too_large")
    assert asked.taken == 0 and asked.headers["connection"] == "close"
    assert ask([LOCAL, JSON, ("content-length", "10")], parts=[b"x" * 10], max_body_size=10).status == 200


@pytest.mark.parametrize("length", ["", "-1", "1e3", "0x1", "1" * 5000, "١"])
def test_a_length_that_is_no_number_is_refused(ask, app, length):
    length = length.encode().decode("latin-1")
    refused(ask([LOCAL, JSON, ("content-length", length)]), app, 400, "invalid_length")


def scripted(messages):
    """A receive that gives these, then waits for ever; and the list of what is left."""
    left = list(messages)

    async def receive():
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive, left


def head(**more):
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": "/", "headers": headers, **more}


def test_a_client_that_leaves_before_its_body_is_whole_asks_nothing(app):
    sent = []
    receive, _ = scripted([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    asyncio.run(guard(app)(head(), receive, sent.append))
    assert app.calls == [] and sent == []


def test_a_body_that_does_not_end_is_given_up(app):
    sent = []

    async def send(message):
        sent.append(message)

    receive, _ = scripted([{"type": "http.request", "body": b"{", "more_body": True}])
    asyncio.run(guard(app, body_timeout=0.01)(head(), receive, send))
    assert sent[0]["status"] == 408 and (b"connection", b"close") in sent[0]["headers"] and app.calls == []
    assert json.loads(sent[1]["body"])["error"]["code"] == "body_timeout"


def test_after_the_body_the_app_hears_that_its_client_left_and_sends_as_it_likes():
    heard, sent = [], []
    last = {"type": "http.disconnect"}
    receive, _ = scripted([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.request"}, last])

    async def streaming(scope, receive, send):
        heard.append(await receive())
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"one", "more_body": True})
        heard.append(await receive())

    async def send(message):
        sent.append((message, len(heard)))

    asyncio.run(guard(streaming)(head(), receive, send))
    assert heard == [{"type": "http.request", "body": b"{", "more_body": False}, last] and heard[1] is last
    assert sent[1] == ({"type": "http.response.body", "body": b"one", "more_body": True}, 1)


@pytest.mark.parametrize("type", ["lifespan", "http"])
def test_an_apps_own_error_goes_through(type):
    async def failing(scope, receive, send):
        raise ZeroDivisionError

    receive, _ = scripted([{"type": "http.request", "body": b"{}"}])
    with pytest.raises(ZeroDivisionError):
        asyncio.run(guard(failing)(head(type=type), receive, None))


def test_a_websocket_gets_past_nothing(app):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(guard(app)(head(type="websocket"), None, send))
    assert [message["type"] for message in sent] == ["websocket.close"] and app.calls == []


NAMES = ("host", "authorization", "content-type", "content-encoding", "content-length", "x-request-id", "origin")
FITTING = [LOCAL[1], JSON[1], AUTH[1], "2", "127.0.0.1", "[::1]:8000", "identity", PAGE]
HEADERS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(FITTING) | st.binary().map(lambda value: value.decode("latin-1")))
)


@settings(deadline=None)
@given(HEADERS, st.sampled_from(["GET", "POST", "OPTIONS", "x"]))
def test_whatever_the_headers_hold_there_is_one_answer_and_none_gets_in_without_a_key(headers, method):
    app = App()
    asked = Asked(guard(app, keys=Keys([KEY]), allowed_origins=[PAGE]), method, "/v1/models", headers, [b"{}"])
    assert [message["type"] for message in asked.sent] == ["http.response.start", "http.response.body"]
    assert re.fullmatch("[ -~]{1,128}", asked.headers["x-request-id"])
    assert bool(app.calls) == (asked.status == 200)
    if app.calls:
        given = {name: [value for key, value in headers if key == name] for name in NAMES}
        assert len(given["host"]) == 1 and len(given["authorization"]) == 1 and KEY in given["authorization"][0]
    else:
        assert asked.status in (400, 401, 413, 415, 421) and asked.error


# -- labels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["x", "a b{}~!", "7" * 128])
def test_u49_a_fit_request_id_comes_back_as_a_label(ask, app, label):
    asked = ask([LOCAL, JSON, ("x-request-id", label)])
    assert asked.headers.get_list("x-request-id") == [label] and app.calls[0].state["request_id"] == label
    assert ask([LOCAL, ("x-request-id", label)]).headers["x-request-id"] == label  # on a refusal too


@pytest.mark.parametrize("labels", [[], [""], ["7" * 129], ["a\x01"], ["é"], ["a\tb"], ["a", "b"]])
def test_any_other_gets_one_that_was_made(ask, app, labels):
    made = [ask([LOCAL, JSON, *(("x-request-id", one) for one in labels)]).headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1] and all(re.fullmatch(r"[0-9a-f]{32}", one) for one in made)
    assert [call.state["request_id"] for call in app.calls] == made


def test_u49_requests_may_share_a_label(ask, app):
    for _ in range(2):
        assert ask([LOCAL, JSON, ("x-request-id", "same")]).status == 200
    assert [call.state["request_id"] for call in app.calls] == ["same", "same"]


# -- CORS --------------------------------------------------------------------------------------------------------------

PREFLIGHT = [
    LOCAL,
    ("origin", PAGE),
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "authorization,content-type,x-stainless-lang"),
]


def test_cors_is_off_unless_asked_for(ask):
    asked = ask([LOCAL, JSON, ("origin", PAGE)])
    assert asked.status == 200 and not [name for name in asked.headers if name.startswith("access-control")]
    assert ask(PREFLIGHT, "OPTIONS", keys=Keys([KEY])).status == 401


def test_a_browsers_preflight_needs_no_key(ask, app):
    asked = ask(PREFLIGHT, "OPTIONS", keys=Keys([KEY]), allowed_origins=[PAGE])
    assert asked.status == 200 and app.calls == []
    assert asked.headers["access-control-allow-origin"] == PAGE
    allowed = asked.headers["access-control-allow-headers"].replace(" ", "").split(",")
    assert {"authorization", "content-type", "x-stainless-lang"} <= set(allowed)
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in asked.headers


def test_an_allowed_page_may_read_answers_and_refusals(ask):
    for headers, status in (([JSON, AUTH], 200), ([JSON], 401), ([AUTH], 415)):
        asked = ask([LOCAL, ("origin", PAGE), *headers], keys=Keys([KEY]), allowed_origins=[PAGE])
        assert asked.status == status and asked.headers["access-control-allow-origin"] == PAGE
        assert "X-Request-Id" in asked.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", ["https://evil.example", "http://chat.example:8443", "null", f"{PAGE}.evil.example"])
def test_no_other_page_may(ask, origin):
    asked = ask([LOCAL, JSON, ("origin", origin)], allowed_origins=[PAGE])
    assert "access-control-allow-origin" not in asked.headers
    assert ask([("origin", origin), *PREFLIGHT[2:], LOCAL], "OPTIONS", allowed_origins=[PAGE]).status == 400


def test_an_allowed_page_does_not_bring_a_foreign_host(ask, app):
    asked = ask([("host", "evil.example"), *PREFLIGHT[1:]], "OPTIONS", allowed_origins=[PAGE])
    refused(asked, app, 421, "foreign_host")


def test_every_page_without_a_key_gets_a_warning(ask, caplog):
    assert ask([LOCAL, JSON, ("origin", PAGE)], allowed_origins=["*"]).headers["access-control-allow-origin"] == "*"
    assert "every web page may use this server" in caplog.text
    caplog.clear()
    ask([LOCAL, JSON, AUTH, ("origin", PAGE)], allowed_origins=["*"], keys=Keys([KEY]))
    assert caplog.text == ""


@pytest.mark.parametrize(
    "origin", ["", "chat.example", "https://chat.example/", "https://Chat.example", "https://*.x", "null"]
)
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(app, origin):
    with pytest.raises(ConfigError, match=re.escape(f"allowed origin {origin!r}: give it as browsers send it")):
        guard(app, allowed_origins=[origin])


@pytest.mark.parametrize("names", [{"allowed_hosts": ("x.example:80",)}, {"allowed_origins": ("x.example",)}])
def test_u85_such_a_name_is_refused_before_a_model_is_looked_for(names):
    with pytest.raises(ConfigError, match=r"allowed (host|origin) 'x\.example"):
        serve({"model": "no-such-model"}, ServerConfig(port=0, **names))


# -- over sockets ------------------------------------------------------------------------------------------------------


class Streaming(App):
    """Like `App`, but /stream sends until its client has left, and says so."""

    def __init__(self):
        super().__init__()
        self.left = threading.Event()

    async def __call__(self, scope, receive, send):
        if scope["path"] != "/stream":
            await super().__call__(scope, receive, send)
            return
        await receive()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        self.left.set()


@contextlib.contextmanager
def serving(app):
    """Give the port where uvicorn serves it."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http="httptools", ws="none", lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(10)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def served():
    """An app behind a guard that takes one key and 1,000 bytes, and its port."""
    app = Streaming()
    with serving(guard(app, keys=Keys([KEY]), max_body_size=1000)) as port:
        yield app, port


@pytest.fixture
def connect(served):
    app, port = served
    app.calls.clear()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        yield connection


def sent(connection, *headers, body=b"", line="POST /v1/completions HTTP/1.1"):
    connection.sendall("\r\n".join([line, *headers, "", ""]).encode() + body)


def answer(connection):
    """(status, headers, body) of one answer with a Content-Length or in chunks."""
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = httpx.Headers([line.strip().split(b": ", 1) for line in iter(file.readline, b"\r\n")])
        if "content-length" in headers:
            return status, headers, file.read(int(headers["content-length"]))
        return status, headers, b"".join(chunks(file))


def chunks(file):
    while length := int(file.readline(), 16):
        yield file.read(length + 2)[:-2]
    file.readline()


FINE = ("Host: localhost", "Content-Type: application/json", f"Authorization: Bearer {KEY}")
CHUNKED = (*FINE, "Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    "hosts", [(), ("Host: localhost", "Host: localhost"), ("Host: localhost", "hOST: evil.example")]
)
def test_one_host_over_a_socket(served, connect, hosts):
    sent(connect, *hosts, *FINE[1:], "Content-Length: 2", body=b"{}")
    status, _, body = answer(connect)
    assert status == 400 and json.loads(body)["error"]["code"] == "invalid_host" and served[0].calls == []


def test_a_page_that_rebound_its_name_gets_nothing(served):
    with httpx.Client(headers={"Authorization": f"Bearer {KEY}"}) as client:
        url = f"http://127.0.0.1:{served[1]}/v1/models"
        assert client.get(url).status_code == 200
        assert client.get(url, headers={"Host": f"evil.example:{served[1]}"}).status_code == 421


def test_a_body_in_chunks(served, connect):
    sent(connect, *CHUNKED, body=b"3\r\nabc\r\n")
    connect.sendall(b"2\r\nde\r\n0\r\n\r\n")
    assert answer(connect)[::2] == (200, b"5") and served[0].calls[0].body == b"abcde"


def test_chunks_over_the_limit_end_the_connection(served, connect):
    sent(connect, *CHUNKED, body=b"258\r\n" + b"x" * 600 + b"\r\n258\r\n" + b"x" * 600)  # whose last chunk is not whole
    status, headers, body = answer(connect)
    assert status == 413 and headers["connection"] == "close"
    assert json.loads(body)["error"]["code"] == "body_too_large" and served[0].calls == []
    assert connect.recv(1) == b""


def test_a_long_body_is_refused_before_it_is_sent(served, connect):
    sent(connect, *FINE, "Content-Length: 1001", "Expect: 100-continue")
    status, _, body = answer(connect)
    assert status == 413 and json.loads(body)["error"]["code"] == "body_too_large"
    assert connect.recv(1) == b"" and served[0].calls == []


def test_a_client_that_sends_a_long_body_anyway_reads_why_it_is_refused(served):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for content in (b"x" * 5_000_000, (b"x" * 50_000 for _ in range(100))):
        response = httpx.post(f"http://127.0.0.1:{served[1]}/v1/completions", headers=headers, content=content)
        assert response.status_code == 413 and response.json()["error"]["code"] == "body_too_large"
    assert httpx.get(f"http://127.0.0.1:{served[1]}/health").status_code == 200


def test_a_slow_body_is_given_up(app):
    with serving(guard(app, body_timeout=0.1)) as port, socket.create_connection(("127.0.0.1", port), 10) as connection:
        sent(connection, *FINE, "Content-Length: 10", body=b"{")
        status, _, body = answer(connection)
        assert status == 408 and json.loads(body)["error"]["type"] == "timeout_error"
        assert connection.recv(1) == b"" and app.calls == []


def test_a_wrong_key_is_answered_before_the_body_came_and_the_connection_goes_on(served, connect):
    sent(connect, *FINE[:2], "Authorization: Bearer nobody", "Content-Length: 4", body=b"{")
    assert answer(connect)[0] == 401
    connect.sendall(b"   ")
    sent(connect, *FINE, "Content-Length: 2", body=b"{}")
    assert answer(connect)[::2] == (200, b"2")


def test_a_client_that_leaves_a_stream_is_noticed(served, connect):
    sent(connect, *FINE, "Content-Length: 2", body=b"{}", line="POST /stream HTTP/1.1")
    received = b""
    while b"first" not in received:
        received += connect.recv(1000)
    assert not served[0].left.is_set()
    connect.close()
    assert served[0].left.wait(10)


@pytest.mark.parametrize("head", [("Content-Length: 2", "Transfer-Encoding: chunked"), ("Content-Length: 2",) * 2])
def test_a_body_of_two_lengths_is_refused(served, connect, head):
    sent(connect, *FINE, *head, body=b"0\r\n\r\n")
    assert connect.recv(1000).startswith(b"HTTP/1.1 400 ") and served[0].calls == []
