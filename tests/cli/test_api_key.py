"""`pagedkv api-key`: what it prints is a key that the file lets in."""

from __future__ import annotations

import hashlib

import pytest
from click.testing import CliRunner

from pagedkv.cli import main as cli
from pagedkv.server.keys import Keys


@pytest.fixture
def run():
    return lambda *arguments: CliRunner().invoke(cli.pagedkv, ["api-key", *arguments])


def test_the_key_and_the_line_for_the_file(run):
    result = run("alice")
    key, line = result.stdout.splitlines()
    assert result.exit_code == 0 and result.stderr == ""
    assert line == f"alice sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def test_the_key_goes_to_the_file_as_a_digest(run, tmp_path):
    path = tmp_path / "keys"
    alice, bob = run("alice", "--file", str(path)), run("-q", "bob", "--file", str(path))
    assert (alice.exit_code, bob.exit_code) == (0, 0)
    assert alice.stderr == f"{path} has its digest; the key itself is shown this once\n" and bob.stderr == ""
    for name, result in (("alice", alice), ("bob", bob)):
        key = result.stdout.strip()
        assert key not in path.read_text() and Keys(file=path).find(f"Bearer {key}".encode()).name == name
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_name_that_is_there_or_none_prints_no_key(run, tmp_path):
    path = str(tmp_path / "keys")
    run("alice", "--file", path)
    again, bad = run("alice", "--file", path), run("two words")
    assert (again.exit_code, again.stdout) == (2, "") and "has a key of alice already" in again.stderr
    assert (bad.exit_code, bad.stdout) == (2, "") and "'two words' is no name for a key" in bad.stderr


def test_a_bad_file_is_left_alone(run, tmp_path):
    path = tmp_path / "keys"
    path.write_text("hunter2\n")
    result = run("alice", "--file", str(path))
    assert result.exit_code == 2 and f"{path}:1: a line is NAME" in result.stderr
    assert path.read_text() == "hunter2\n" and result.stdout == ""
