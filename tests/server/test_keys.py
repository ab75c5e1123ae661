"""API keys: who is let in, which tenant that is, and what a file of keys may say."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import logging
import os
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedkv.api.errors import ConfigError
from pagedkv.server.keys import Keys, append_key, key_line, new_key, read_key_file
from pagedkv.server.settings import ServerConfig

ALICE, BOB = "sk-alice-0123456789", "sk-bob-01234567890"


def digest(key):
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key):
    return f"Bearer {key}".encode()


@pytest.fixture
def write(tmp_path):
    def write(text, mode=0o600):
        path = tmp_path / "keys"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        return path

    return write


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.INFO, logger="pagedkv")
    return lambda: [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


# -- who is let in -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, b"", b"Bearer whatever", b"Basic eDp5", b"\xff\xfe"])
def test_without_keys_everybody_is_one_anonymous_tenant(header):
    tenant = Keys().find(header)
    assert tenant == Keys().find(b"Bearer other") and tenant.name == "anonymous" and Keys().names == ()


def test_a_key_leads_to_its_tenant(write):
    keys = Keys([BOB], write(f"# of the team\n\n  alice   sha256:{digest(ALICE).upper()}\r\n"))
    assert keys.find(bearer(ALICE)).name == "alice"
    assert keys.find(bearer(BOB)).name == "API key 1"
    assert keys.names == ("API key 1", "alice")


@pytest.mark.parametrize("header", [b"bearer %s", b"BEARER   %s", b"Bearer %s ", b"bEaReR %s"])
def test_the_scheme_is_read_in_any_case(header):
    assert Keys([ALICE]).find(header % ALICE.encode()).name == "API key 1"


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        ALICE.encode(),
        b"Bearer" + ALICE.encode(),
        b"Basic " + ALICE.encode(),
        bearer(ALICE[:-1]),
        bearer(ALICE + "x"),
        bearer(ALICE.upper()),
        bearer(f"{ALICE} x"),
        bearer(f"{ALICE},{ALICE}"),
        bearer(digest(ALICE)),
        bearer(f"sha256:{digest(ALICE)}"),
        b"Bearer \xff\xfe",
        b"Bearer " + bytes(range(256)),
    ],
)
def test_nothing_but_the_key_lets_in(header):
    assert Keys([ALICE]).find(header) is None


def test_the_digest_of_nothing_lets_nobody_in(write):
    keys = Keys(file=write(f"nobody sha256:{digest('')}"))
    assert keys.find(b"Bearer ") is None and keys.find(b"") is None and keys.find(None) is None


@pytest.mark.parametrize("asked", [ALICE, BOB, "sk-of-nobody"])
def test_every_key_is_compared_whole_and_without_an_early_end(monkeypatch, asked):
    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda *pair: compared.append(pair) or pair[0] == pair[1])
    keys = Keys([ALICE, BOB, "third-key-0123456789"])
    keys.find(bearer(asked))
    assert [len(one) for pair in compared for one in pair] == [32] * 6


def test_a_key_twice_among_the_options_is_one_key(write):
    assert Keys([ALICE, ALICE]).names == ("API key 1",)
    with pytest.raises(ConfigError, match="API key 1 and alice are one and the same key"):
        Keys([ALICE], write(f"alice sha256:{digest(ALICE)}"))


@pytest.mark.parametrize(
    "key", ["", " ", "two words-0123456789", "schlüssel-0123456789", "new\nline-0123456789", "a\x7f"]
)
def test_a_key_that_no_header_carries_is_refused_and_not_shown(key):
    with pytest.raises(ConfigError, match="API key 2 is empty or holds a space") as caught:
        Keys([ALICE, key])
    assert not key.strip() or key not in str(caught.value)


def test_a_short_key_is_taken_with_a_warning(warnings):
    assert Keys(["token-abc123"]).find(b"Bearer token-abc123") is not None
    (warning,) = warnings()
    assert "API key 1 has fewer than 16 characters" in warning and "token-abc123" not in warning


def test_the_environment_adds_one_key():
    keys = Keys.of([ALICE], None, {"PAGEDKV_API_KEY": BOB})
    assert keys.find(bearer(ALICE)).name == "API key 1" and keys.find(bearer(BOB)).name == "API key 2"
    assert Keys.of([], None, {}).names == ()


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_variable_does_not_open_the_server(value):
    with pytest.raises(ConfigError, match="PAGEDKV_API_KEY is empty: set it to a key, or unset it"):
        Keys.of([], None, {"PAGEDKV_API_KEY": value})


# -- tenants and salts -------------------------------------------------------------------------------------------------


def test_a_tenants_salt_follows_from_its_key_alone(write):
    one, other = Keys([ALICE]), Keys([BOB], write(f"alice sha256:{digest(ALICE)}"))
    assert one.find(bearer(ALICE)).salt == other.find(bearer(ALICE)).salt
    salts = {one.find(bearer(ALICE)).salt, other.find(bearer(BOB)).salt, Keys().find(None).salt}
    assert len(salts) == 3 and {len(salt) for salt in salts} == {32}
    assert bytes.fromhex(digest(ALICE)) not in salts


@settings(deadline=None)
@given(st.lists(st.none() | st.text(), min_size=2, max_size=6, unique=True))
@example([None, "", ":", "x", "x:", ":x"])
def test_a_requests_salt_only_narrows(asked):
    tenants = [Keys([ALICE, BOB]).find(bearer(key)) for key in (ALICE, BOB)] + [Keys().find(None)]
    asked = [*asked, *(tenant.cache_salt(None) for tenant in tenants)]  # one tenant names another's salt
    pairs = list(itertools.product(tenants, dict.fromkeys(asked)))
    assert len({tenant.cache_salt(salt) for tenant, salt in pairs}) == len(pairs)
    assert all(tenant.cache_salt(salt) == tenant.cache_salt(salt) for tenant, salt in pairs)


def test_neither_key_nor_digest_nor_salt_is_shown(write, caplog):
    caplog.set_level(logging.DEBUG, logger="pagedkv")
    keys = Keys([ALICE], write(f"bob sha256:{digest(BOB)}"))
    keys.reload()
    tenant = keys.find(bearer(ALICE))
    shown = f"{keys!r} {keys} {tenant!r} {tenant} {keys.names} {ServerConfig(api_keys=(ALICE,))} {caplog.text}"
    assert "API key 1" in shown
    for secret in (ALICE, BOB, digest(ALICE), digest(BOB), tenant.salt.hex(), repr(tenant.salt)):
        assert secret not in shown


# -- the file ----------------------------------------------------------------------------------------------------------

PLAIN = "hunter2-hunter2-hunter2"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (PLAIN, "a line is NAME sha256:HEX"),
        (f"alice {PLAIN}", "Keys in plain text are not taken from a file"),
        (f"alice sha256:{PLAIN}", "64 hexadecimal digits"),
        (f"alice sha256:{digest(PLAIN)[:-1]}", "64 hexadecimal digits"),
        (f"alice sha256:{digest(PLAIN)}0", "64 hexadecimal digits"),
        (f"alice sha512:{digest(PLAIN)}", "64 hexadecimal digits"),
        (f"alice sha256: {digest(PLAIN)}", "a line is NAME sha256:HEX"),
        (f"alice sha256:{digest(PLAIN)} # comment", "a line is NAME sha256:HEX"),
        (f"-alice sha256:{digest(PLAIN)}", "a line is NAME sha256:HEX"),
        (f"{'a' * 65} sha256:{digest(PLAIN)}", "a line is NAME sha256:HEX"),
        (f"bob sha256:{digest(PLAIN)}", "the name bob is there already"),
    ],
)
def test_a_bad_line_is_named_and_not_shown(write, line, says):
    path = write(f"# one that is fine\nbob sha256:{digest(BOB)}\n{line}\n")
    with pytest.raises(ConfigError, match=re.escape(f"{path}:3: ")) as caught:
        Keys(file=path)
    assert says in str(caught.value)
    assert PLAIN not in str(caught.value) and digest(PLAIN)[:-1] not in str(caught.value)


def test_a_file_without_a_key_does_not_open_the_server(write):
    with pytest.raises(ConfigError, match="holds no key: add one with `pagedkv api-key NAME --file"):
        Keys(file=write("# nothing yet\n"))


def test_a_file_that_is_no_text_or_not_there(write, tmp_path):
    with pytest.raises(ConfigError, match="is no UTF-8 text"):
        Keys(file=write(b"alice \xff"))
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        Keys(file=tmp_path / "gone")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        Keys(file=tmp_path)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, 0), (0o400, 0), (0o640, 0), (0o660, 1), (0o644, 1), (0o602, 1)])
def test_a_file_that_others_can_read_or_change_gets_a_warning(write, warnings, mode, warned):
    path = write(f"alice sha256:{digest(ALICE)}", mode)
    assert Keys(file=path).names == ("alice",)
    assert [f"chmod 600 {path}" in warning for warning in warnings()] == [True] * warned


def test_the_file_is_read_again_on_request(write, caplog):
    keys = Keys([ALICE], write(f"bob sha256:{digest(BOB)}\n"))
    caplog.set_level(logging.INFO, logger="pagedkv")
    write(f"carol sha256:{digest('carols-key-0123456789')}\n")
    keys.reload()
    assert keys.find(bearer(BOB)) is None and keys.find(bearer(ALICE)).name == "API key 1"
    assert keys.find(b"Bearer carols-key-0123456789").name == "carol"
    assert "2 in all; new: carol; gone: bob" in caplog.text


@pytest.mark.parametrize("text", ["", "alice", b"\xff"])
def test_a_file_that_became_bad_leaves_the_keys_as_they_were(write, text, caplog):
    keys = Keys(file=write(f"bob sha256:{digest(BOB)}\n"))
    path = write(text)
    keys.reload()
    (error,) = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert error.startswith("the API keys stay as they were: ") and str(path) in error
    assert keys.find(bearer(BOB)).name == "bob" and keys.find(bearer(ALICE)) is None


def test_keys_are_random_and_fit_a_header():
    made = {new_key() for _ in range(100)}
    assert len(made) == 100 and all(re.fullmatch(r"sk-[\w-]{43}", key) for key in made)  # 43 x 6 bits hold 256


def test_a_line_holds_name_and_digest():
    assert key_line("alice", ALICE) == f"alice sha256:{digest(ALICE)}\n"
    for name in ("", "two words", "#alice", "a\nb", "a:b", "é"):
        with pytest.raises(ConfigError, match="is no name for a key"):
            key_line(name, ALICE)


def test_a_key_is_appended_for_the_owner_alone(tmp_path, write):
    path = tmp_path / "new"
    append_key(path, "alice", ALICE)
    assert path.stat().st_mode & 0o777 == 0o600 and Keys(file=path).find(bearer(ALICE)).name == "alice"
    path = write(f"# kept\nbob sha256:{digest(BOB)}")  # whose last line has no end
    inode = os.stat(path).st_ino
    append_key(path, "alice", ALICE)
    assert path.read_text() == f"# kept\nbob sha256:{digest(BOB)}\nalice sha256:{digest(ALICE)}\n"
    assert os.stat(path).st_ino == inode  # a container that has the file mounted sees the change


def test_a_name_that_is_there_is_refused(write):
    path = write(f"alice sha256:{digest(BOB)}\n")
    with pytest.raises(ConfigError, match="has a key of alice already"):
        append_key(path, "alice", ALICE)
    assert read_key_file(path) == {"alice": bytes.fromhex(digest(BOB))}


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        append_key(tmp_path / "gone" / "keys", "alice", ALICE)
