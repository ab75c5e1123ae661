"""U76: a selection variable has no effect any more and nothing says so."""

from __future__ import annotations

import logging

import pytest

from pagedkv import environment, plugins
from pagedkv.api.errors import BackendNotFound
from tests.helpers.plugin_dists import descriptor, install


@pytest.fixture(autouse=True)
def _two_backends(tmp_path, monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    environment._warn_of_variable.cache_clear()
    for name, score in (("best", 90), ("plain", 20)):
        install(tmp_path / name, descriptor(name, score=score), name=name, distribution=f"{name}-dist")
        monkeypatch.syspath_prepend(str(tmp_path / name))


def test_u76_an_unknown_value_is_an_error_that_lists_the_names(monkeypatch):
    monkeypatch.setenv("PAGEDKV_BACKEND", "nosuch")
    with pytest.raises(BackendNotFound, match="'nosuch'") as caught:
        plugins.select()
    assert {"best", "plain"} <= set(caught.value.known)


@pytest.mark.parametrize("value", ["plain", "PLAIN", " plain ", "\tPlain\n"])
def test_u76_case_and_blanks_do_not_matter(monkeypatch, value):
    monkeypatch.setenv("PAGEDKV_BACKEND", value)
    assert plugins.select().name == "plain"


@pytest.mark.parametrize("value", ["", "   ", "auto"])
def test_u76_empty_is_unset(monkeypatch, value):
    monkeypatch.setenv("PAGEDKV_BACKEND", value)
    assert plugins.requested() == (None, "automatic")


def test_u76_with_an_empty_variable_the_best_is_chosen(monkeypatch):
    monkeypatch.setenv("PAGEDKV_BACKEND", "")
    chosen = plugins.select()
    assert (chosen.name, chosen.explicit) == ("best", False)


def test_u76_the_argument_comes_before_the_environment_and_that_is_said(monkeypatch, caplog):
    monkeypatch.setenv("PAGEDKV_BACKEND", "plain")
    caplog.set_level(logging.INFO, logger="pagedkv")
    assert plugins.select("best").name == "best"
    assert "comes before PAGEDKV_BACKEND=plain" in caplog.text


def test_u76_a_misspelt_variable_warns_once_with_a_suggestion(monkeypatch, caplog):
    monkeypatch.setenv("PAGEDKV_BACKEDN", "plain")
    monkeypatch.setenv("PAGEDKV_ZZZ", "1")
    plugins.select("best")
    plugins.select("best")
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 2
    assert "PAGEDKV_BACKEDN has no effect" in warnings[0] and "did you mean PAGEDKV_BACKEND?" in warnings[0]
    assert "PAGEDKV_ZZZ has no effect" in warnings[1] and "PAGEDKV_LOG_LEVEL" in warnings[1]
