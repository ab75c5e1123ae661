"""U78: the core grows and out-of-tree backends die; a version is compared first, and both stand in a refusal."""

from __future__ import annotations

import pytest

from pagedkv import plugins
from pagedkv.api.errors import BackendError, BackendVersionError
from tests.helpers.broken_plugins import VERSIONS, distribution, site


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.syspath_prepend(str(site(tuple(VERSIONS))))


@pytest.mark.parametrize("name", [name for name, wrong in VERSIONS.items() if wrong.selecting is None])
def test_u78_a_version_that_fits_is_loaded_and_created(name):
    chosen = plugins.select(name)
    assert chosen.distribution == distribution(name)
    assert plugins.create(chosen).capabilities().preferred_block_size == 32


@pytest.mark.parametrize("name", [name for name, wrong in VERSIONS.items() if wrong.selecting])
def test_u78_any_other_is_refused_with_both_versions(name):
    said = VERSIONS[name].selecting
    with pytest.raises(BackendError) as caught:
        plugins.select(name)
    assert said in str(caught.value) and f"{distribution(name)} 0.3" in str(caught.value)
    assert isinstance(caught.value, BackendVersionError) == said.startswith("for contract")


def test_u78_the_listing_says_the_version_of_both():
    rows = {status.name: status for status in plugins.probe_all(["v2-0", "v1-99-min-0"])}
    assert (rows["v2-0"].api, rows["v2-0"].status) == ("2.0", "failed")
    assert VERSIONS["v2-0"].said in rows["v2-0"].reasons[0]
    assert (rows["v1-99-min-0"].api, rows["v1-99-min-0"].status) == ("1.99", "ok")
