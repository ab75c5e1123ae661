"""U77: every name that an error suggests is one that the setting accepts."""

from __future__ import annotations

import re

import pytest

from pagedkv import plugins
from pagedkv.api.errors import BackendLoadError, BackendNotFound, BackendUnavailable, ConfigError
from pagedkv.cli.main import pagedkv as command
from pagedkv.config import EngineConfig
from tests.helpers.plugin_dists import descriptor, install

NEEDS_HARDWARE = {"ascend", "cuda", "jetson"}


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
    for name in sorted(set(listed) - NEEDS_HARDWARE - {"cpu"}):
        assert plugins.select(name).name == name


def test_u77_a_name_that_would_be_refused_is_not_suggested(tmp_path, monkeypatch):
    for number in (1, 2):
        install(tmp_path / f"{number}", descriptor("both"), name="both", distribution=f"both-{number}")
        monkeypatch.syspath_prepend(str(tmp_path / f"{number}"))
    with pytest.raises(BackendNotFound) as caught:
        plugins.select("boht")
    assert "both" not in caught.value.known and "'both'" not in str(caught.value)


def test_u77_every_name_of_the_list_can_be_pasted_back(tmp_path, monkeypatch):
    """Those that are used by name only, and those that are refused for another reason, included."""
    install(tmp_path / "a", descriptor("by-name", score=0), name="by-name", distribution="by-name-dist")
    install(tmp_path / "b", "import no_such_vendor", name="stale", distribution="stale-dist")
    for folder in ("a", "b"):
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    with pytest.raises(BackendNotFound) as caught:
        plugins.select("nosuch")
    listed = caught.value.known
    assert {"by-name", "stale", "cpu"} <= set(listed)
    for name in listed:
        found = plugins.find(f" {name.upper()} ")
        assert found.name == name
        try:
            assert plugins.select(name).name == name
        except BackendLoadError as error:
            assert name == "stale" and "no_such_vendor" in str(error)
        except BackendUnavailable as error:
            assert name in NEEDS_HARDWARE and "cannot be used: device 0" in str(error)


@pytest.mark.parametrize("setting", ["dtype", "kv_cache_dtype"])
def test_u77_accepted_values_in_a_refusal_are_accepted(setting):
    with pytest.raises(ConfigError) as wrong:
        EngineConfig.of(model="m", **{setting: "nosuch"})
    for value in str(wrong.value).partition("one of ")[2].split(", "):
        assert getattr(EngineConfig.of(model="m", **{setting: value}), setting) == value


def test_u77_commands_in_the_help_text_exist():
    context = command.make_context("pagedkv", ["--help-is-not-asked-for"], resilient_parsing=True)
    for name in command.list_commands(context):
        assert command.get_command(context, name).name == name
