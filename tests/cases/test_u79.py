"""U79: a member that a plugin lacks is told when it is loaded, not inside a model; an optional one has a default."""

from __future__ import annotations

import pytest

from pagedkv import plugins
from pagedkv.api import UnsupportedError
from pagedkv.api.errors import BackendLoadError
from tests.helpers.broken_plugins import METHODS, site


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.syspath_prepend(str(site()))


@pytest.mark.parametrize("name", [name for name, wrong in METHODS.items() if wrong.selecting])
def test_u79_a_descriptor_that_lacks_a_member_is_refused_when_loaded(name):
    with pytest.raises(BackendLoadError) as caught:
        plugins.select(name)
    assert METHODS[name].selecting in str(caught.value)


@pytest.mark.parametrize("name", [name for name, wrong in METHODS.items() if wrong.creating])
def test_u79_an_instance_that_lacks_a_method_is_refused_when_created(name):
    chosen = plugins.select(name)
    with pytest.raises(BackendLoadError) as caught:
        plugins.create(chosen)
    assert METHODS[name].creating in str(caught.value)
    lacking = (METHODS[name].members or {}).get("backend_without", ())
    assert all(method in str(caught.value) for method in lacking)


def test_u79_what_is_optional_has_a_default():
    chosen = plugins.select("no-optional")
    backend = plugins.create(chosen)
    assert (dict(chosen.descriptor.diagnose()), chosen.descriptor.options) == ({}, ())
    assert (backend.torch_device, backend.extension("graph"), backend.memory().total) == ("cpu", None, None)
    with pytest.raises(UnsupportedError, match="no collectives"):
        backend.communicator((0, 1))


def test_u79_a_method_that_this_core_does_not_know_is_left_alone():
    chosen = plugins.select("one-more")
    backend = plugins.create(chosen)
    assert (chosen.descriptor.tune(), backend.refresh_table([1])) == (1, [1])
