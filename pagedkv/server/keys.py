"""API keys: who may ask, and whose cached prefixes a request may meet. Only digests of keys are kept."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pagedkv.api.errors import ConfigError

_log = logging.getLogger("pagedkv.server")

VARIABLE = "PAGEDKV_API_KEY"
"""The environment variable that holds one key more."""
SHORT = 16
"""Keys of fewer characters get a warning."""

_BEARER = re.compile(rb"bearer +([!-~]+)", re.IGNORECASE)
_KEY = re.compile(r"[!-~]+")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NAME_RULE = "1 to 64 letters, digits and . _ @ - beginning with a letter or digit"
_DIGEST = re.compile(r"sha256:([0-9A-Fa-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Whose key a request came with. `salt` (32 bytes) follows from the key and is the same after a restart."""

    name: str
    salt: bytes = field(repr=False)

    def cache_salt(self, request_salt: str | None) -> str:
        """What the engine shares cached prefixes within: one tenant's requests of one `request_salt`.

        Tenants' salts differ and are all of one length, so no salt that a request names leads to another tenant.
        """
        own = self.salt.hex()
        return own if request_salt is None else f"{own}:{request_salt}"


ANONYMOUS = "anonymous"
"""The tenant of all requests to a server without keys."""


class Keys:
    """The keys of a server. With none of them every caller is let in, as one anonymous tenant."""

    def __init__(self, api_keys: Sequence[str] = (), file: str | os.PathLike[str] | None = None) -> None:
        """Take `api_keys` and what the lines of `file` say.

        Raises `ConfigError`: a value that no header can carry, a bad line, a name or a key that is there twice, a file
        without a key.
        """
        self._given = dict(_given(api_keys))
        self._file = None if file is None else Path(file)
        self._tenants = self._read()

    @classmethod
    def of(
        cls,
        api_keys: Sequence[str] = (),
        file: str | os.PathLike[str] | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> Keys:
        """These keys and the one in `PAGEDKV_API_KEY`. Raises `ConfigError`, also where that is set and empty."""
        key = environ.get(VARIABLE)
        if key is None:
            return cls(api_keys, file)
        if not key.strip():
            raise ConfigError(f"{VARIABLE} is empty: set it to a key, or unset it to serve without one")
        return cls((*api_keys, key), file)

    @property
    def names(self) -> tuple[str, ...]:
        """Whose keys there are; empty: every caller is let in."""
        return tuple(tenant.name for _, tenant in self._tenants)

    def find(self, authorization: bytes | None) -> Tenant | None:
        """The tenant of an Authorization header; None: it holds none of the keys. Takes the same time for every key."""
        if not self._tenants:
            return _tenant(ANONYMOUS, b"")
        bearer = _BEARER.fullmatch((authorization or b"").strip())
        if bearer is None:
            return None
        asked, found = hashlib.sha256(bearer[1]).digest(), None
        for digest, tenant in self._tenants:
            if hmac.compare_digest(digest, asked):
                found = tenant
        return found

    def reload(self) -> None:
        """Read the file again and log whose keys came and went, or why it is bad and they all stay."""
        before = set(self.names)
        try:
            self._tenants = self._read()
        except ConfigError as error:
            _log.error("the API keys stay as they were: %s", error)
            return
        now = set(self.names)
        came, went = (", ".join(sorted(names)) or "none" for names in (now - before, before - now))
        _log.info("API keys read again: %d in all; new: %s; gone: %s", len(now), came, went)

    def _read(self) -> tuple[tuple[bytes, Tenant], ...]:
        digests = dict(self._given)
        if self._file is not None:
            listed = read_key_file(self._file)
            if not listed:
                raise ConfigError(
                    f"{self._file} holds no key: add one with `pagedkv api-key NAME --file {self._file}`, or leave "
                    "--api-key-file out to serve without keys"
                )
            digests |= listed
        owners: dict[bytes, str] = {}
        for name, digest in digests.items():
            if owners.setdefault(digest, name) != name:
                raise ConfigError(f"{owners[digest]} and {name} are one and the same key: leave one of them out")
        return tuple((digest, _tenant(name, digest)) for digest, name in owners.items())


def _tenant(name: str, digest: bytes) -> Tenant:
    return Tenant(name=name, salt=hashlib.blake2b(b"pagedkv cache salt", key=digest, digest_size=32).digest())


def _given(api_keys: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """(name, digest) of keys in plain text. The names hold a space, so that none of a file's is the same."""
    for number, key in enumerate(dict.fromkeys(api_keys), 1):
        name = f"API key {number}"
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{name} is empty or holds a space, a control character or a letter outside ASCII, which no header "
                "carries; `pagedkv api-key NAME` makes one that fits"
            )
        if len(key) < SHORT:
            _log.warning(
                "%s has fewer than %d characters and may be guessed; `pagedkv api-key NAME` makes a good one",
                name,
                SHORT,
            )
        yield name, hashlib.sha256(key.encode("ascii")).digest()


# -- the file ----------------------------------------------------------------------------------------------------------


def read_key_file(path: Path) -> dict[str, bytes]:
    """Name -> digest, of lines `NAME sha256:HEX`; lines that are empty or start with # say nothing.

    Raises `ConfigError` with file and line, never with what stands there: it may be a key.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"the file of API keys {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"the file of API keys {path} is no UTF-8 text: give lines of NAME sha256:HEX") from None
    if os.name == "posix" and mode & 0o027:
        _log.warning(
            "%s may be read by anybody here or written by its group (mode %o): chmod 600 %s", path, mode & 0o777, path
        )
    digests: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, digest = _read_line(line.split(), f"{path}:{number}")
            if name in digests:
                raise ConfigError(
                    f"{path}:{number}: the name {name} is there already; each key needs a name of its own"
                )
            digests[name] = digest
    return digests


def _read_line(words: list[str], where: str) -> tuple[str, bytes]:
    if len(words) != 2 or not _NAME.fullmatch(words[0]):
        raise ConfigError(f"{where}: a line is NAME sha256:HEX, where NAME is {_NAME_RULE}")
    digest = _DIGEST.fullmatch(words[1])
    if digest is None:
        raise ConfigError(
            f"{where}: no digest stands behind the name, which is sha256: and 64 hexadecimal digits. Keys in plain "
            "text are not taken from a file; `pagedkv api-key NAME` makes a key and the line for it"
        )
    return words[0], bytes.fromhex(digest[1])


def new_key() -> str:
    """A key of 256 random bits."""
    return f"sk-{secrets.token_urlsafe(32)}"


def key_line(name: str, key: str) -> str:
    """The line of a key file that lets `key` in. Raises `ConfigError` for a name that cannot stand there."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is no name for a key: it is {_NAME_RULE}")
    return f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}\n"


def append_key(path: Path, name: str, key: str) -> None:
    """Let `key` in under `name`; a new file is its owner's alone. Raises `ConfigError`, also if the name is there."""
    line = key_line(name, key)
    if path.exists() and name in read_key_file(path):
        raise ConfigError(f"{path} has a key of {name} already: choose another name, or delete that line first")
    try:
        with open(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600), "r+b") as file:
            before = file.read()
            ended = not before or before.endswith(b"\n")
            file.write(line.encode() if ended else b"\n" + line.encode())
    except OSError as error:
        raise ConfigError(f"the file of API keys {path} cannot be written: {error.strerror}") from error
