"""U89: merely installing a plugin alters what others run; here one that is not chosen has no effect."""

from __future__ import annotations

import sys

import pytest

import pagedkv.api
from pagedkv import plugins
from pagedkv.api import records
from pagedkv.core import negotiation
from tests.helpers.engine_rig import engine, greedy, solo, token_ids
from tests.helpers.plugin_dists import descriptor, install

PATCH = "import pagedkv.core.negotiation as n, pagedkv.api as a; n.negotiate = a.needs = None"


@pytest.fixture(autouse=True)
def _patching(tmp_path, monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    source = descriptor("greedy", score=99, top=PATCH)
    install(tmp_path, source, name="greedy", distribution="greedy-dist", module="greedy_of_u89")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("backend", ["cpu", None])
def test_u89_a_run_with_it_installed_is_a_run_without_it(backend):
    functions = (negotiation.negotiate, pagedkv.api.needs, records.needs)
    with engine(backend=backend) as llm:
        assert llm.engine.parts.backend_name == "cpu"
        outputs = llm.generate([[5, 6, 7]], greedy(4), use_tqdm=False)
    assert token_ids(outputs) == [solo([5, 6, 7], greedy(4))]
    assert "greedy_of_u89" not in sys.modules
    assert (negotiation.negotiate, pagedkv.api.needs, records.needs) == functions


def test_u89_when_it_is_asked_about_it_is_its_row_that_says_so():
    rows = {status.name: status for status in plugins.probe_all(["greedy", "cpu"])}
    assert rows["greedy"].status == "failed" and rows["cpu"].status == "ok"
    assert "replaced pagedkv.api.needs" in rows["greedy"].reasons[0]
    assert pagedkv.api.needs is records.needs
