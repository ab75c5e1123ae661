"""U71: two backends are available; one is chosen by a fixed rule, and the text says how to choose the other."""

from __future__ import annotations

import pytest

from pagedkv import plugins
from tests.helpers.plugin_dists import descriptor, install


@pytest.fixture
def two(tmp_path, monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)

    def put(zeta: int, alpha: int) -> None:
        for name, score in (("zeta", zeta), ("alpha", alpha)):
            install(tmp_path / name, descriptor(name, score=score), name=name, distribution=f"{name}-dist")
            monkeypatch.syspath_prepend(str(tmp_path / name))

    return put


def test_u71_equal_scores_are_decided_by_name_and_it_says_so(two):
    two(70, 70)
    chosen = plugins.select()
    assert chosen.name == "alpha"
    assert "zeta" in chosen.why and "PAGEDKV_BACKEND" in chosen.why


def test_u71_different_scores_decide(two):
    two(80, 70)
    assert plugins.select().name == "zeta"


def test_u71_the_environment_decides_against_the_score(two, monkeypatch):
    two(80, 70)
    monkeypatch.setenv("PAGEDKV_BACKEND", "alpha")
    chosen = plugins.select()
    assert (chosen.name, chosen.explicit, chosen.why) == ("alpha", True, "chosen by PAGEDKV_BACKEND")
