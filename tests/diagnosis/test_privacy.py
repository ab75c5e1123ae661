"""What a bug report must not hold."""

from __future__ import annotations

import sys
import sysconfig

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.diagnosis import privacy
from pagedkv.diagnosis.privacy import Privacy


@pytest.fixture
def jane(tmp_path, monkeypatch):
    home = tmp_path / "home" / "janedoe"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(privacy.getpass, "getuser", lambda: "janedoe")
    monkeypatch.setattr(privacy.socket, "gethostname", lambda: "secretbox.example.org")
    return home


def test_known_folders_become_their_meaning(jane):
    clean = Privacy([str(jane / "models" / "llama")], kept=["cpu"]).text
    assert clean(f"{jane}/models/llama/config.json") == "<path>/llama/config.json"
    assert clean(f"{jane}/x") == "~/x"
    assert clean(f"{sysconfig.get_path('purelib')}/torch") == "<site-packages>/torch"
    assert clean(f"{sys.prefix}/bin/python") == "<python>/bin/python"


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("open /data/jane/private/weights.bin failed", "open <path>/weights.bin failed"),
        ("cannot open '/mnt/x/y.so', or /mnt/x/z.so:3", "cannot open '<path>/y.so', or <path>/z.so:3"),
        ("C:\\Users\\Jane\\models\\a.gguf", "<path>/a.gguf"),
        ("/usr/lib/libfoo.so and /opt/vendor/lib/libbar.so", "/usr/lib/libfoo.so and /opt/vendor/lib/libbar.so"),
        ("asked by janedoe on secretbox", "asked by <user> on <host>"),
        ("secretbox.example.org refused", "<host> refused"),
        ("https://jane:pw@example.org/simple", "https://<secret>@example.org/simple"),
        ("hf_abcdefghijklmnop was refused", "<secret> was refused"),
        ("token=abcdef0123456789", "<secret>"),
        ("GPU 0 GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "GPU 0 GPU-<secret>"),
        ("docker run --gpus all, 12.0/13.0, a/b and 1 / 2", "docker run --gpus all, 12.0/13.0, a/b and 1 / 2"),
        ("cpu", "cpu"),
    ],
)
def test_texts(jane, text, cleaned):
    assert Privacy(kept=["cpu"]).text(text) == cleaned


def test_a_models_folder_is_hidden_however_it_is_spelt_and_a_hub_id_is_not(jane, tmp_path, monkeypatch):
    (tmp_path / "my private" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    clean = Privacy(["my private/llama"]).text
    assert clean(f"'{tmp_path}/my private/llama/config.json' and 'my private/llama'") == (
        "'<path>/llama/config.json' and '<path>/llama'"
    )
    assert Privacy(["org/name"]).text("org/name is not here") == "org/name is not here"


WORD = st.text("abcdefghijklmnop0123456789-_.", min_size=1, max_size=9).filter(lambda word: set(word) != {"."})
AROUND = st.sampled_from(["{}", "'{}'", "cannot open {}: no such file", "x={},", "({})", "{}:/usr/lib", "[{}]"])


@given(
    st.lists(WORD, max_size=3), st.lists(WORD, max_size=3), WORD, AROUND, st.sampled_from(["/data", "/mnt", "/home"])
)
def test_no_folder_outside_the_systems_own_is_ever_shown(before, after, last, around, root):
    path = "/".join((root, *before, "SecretFolder", *after, last))
    cleaned = Privacy().text(around.format(path))
    assert "SecretFolder" not in cleaned and root not in cleaned
    assert Privacy().text(cleaned) == cleaned, "cleaning twice changes nothing"


def test_values_in_every_depth_and_what_a_key_tells(jane):
    value = {"a": [{"b": f"{jane}/x", "c": 3, "d": None}], "e": True, "on secretbox": 1}
    assert Privacy().clean(value) == {"a": [{"b": "~/x", "c": 3, "d": None}], "e": True, "on <host>": 1}


def test_a_user_called_like_a_word_of_the_report_changes_no_word(jane, monkeypatch):
    monkeypatch.setattr(privacy.getpass, "getuser", lambda: "torch")
    assert Privacy(kept={"torch"}).clean({"torch": "torch 2.13"}) == {"torch": "torch 2.13"}


def test_a_common_name_is_left_alone(monkeypatch):
    monkeypatch.setattr(privacy.getpass, "getuser", lambda: "root")
    monkeypatch.setattr(privacy.socket, "gethostname", lambda: "localhost")
    assert Privacy().text("root of localhost") == "root of localhost"


def test_a_user_without_an_entry_is_no_error(monkeypatch):
    def fail():
        raise KeyError("uid not found")

    monkeypatch.setattr(privacy.getpass, "getuser", fail)
    assert Privacy().text("fine") == "fine"
