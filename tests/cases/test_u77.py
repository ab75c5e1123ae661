"""U77: every name that an error suggests is one that the setting accepts."""

from __future__ import annotations

import re

import pytest

from pagedkv import plugins
from pagedkv.api.errors import BackendNotFound
from pagedkv.cli.main import pagedkv as command
from tests.helpers.plugin_dists import descriptor, install


def test_u77_names_in_the_error_can_be_pasted_back(tmp_path, monkeypatch):
    for name in ("alpha", "beta-2", "gamma_3"):
        install(tmp_path / name, descriptor(name), name=name, distribution=f"{name}-dist")
        monkeypatch.syspath_prepend(str(tmp_path / name))
    with pytest.raises(BackendNotFound) as caught:
        plugins.select("alpa")
    wrong, suggested, *listed = re.findall(r"'([^']+)'", str(caught.value))
    assert (wrong, suggested) == ("alpa", "alpha")
    assert {"alpha", "beta-2", "gamma_3", "cpu"} <= set(listed)
    for name in listed:
        assert plugins.find(name).name == name
    for name in sorted(set(listed) - {"cpu"}):
        assert plugins.select(name).name == name


def test_u77_a_name_that_would_be_refused_is_not_suggested(tmp_path, monkeypatch):
    for number in (1, 2):
        install(tmp_path / f"{number}", descriptor("both"), name="both", distribution=f"both-{number}")
        monkeypatch.syspath_prepend(str(tmp_path / f"{number}"))
    with pytest.raises(BackendNotFound) as caught:
        plugins.select("boht")
    assert "both" not in caught.value.known and "'both'" not in str(caught.value)


def test_u77_commands_in_the_help_text_exist():
    context = command.make_context("pagedkv", ["--help-is-not-asked-for"], resilient_parsing=True)
    for name in command.list_commands(context):
        assert command.get_command(context, name).name == name
