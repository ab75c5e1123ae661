"""U72: an editable install is seen twice, as egg-info in the working folder and as dist-info; it counts once."""

from __future__ import annotations

import pytest

from pagedkv import plugins
from tests.helpers.plugin_dists import descriptor, install


@pytest.mark.parametrize("second_name", ["twice-dist", "Twice.Dist", "twice-dist-renamed"])
def test_u72_identical_entries_count_once(tmp_path, monkeypatch, second_name):
    source = descriptor("twice")
    for folder, form, distribution in (("work", "egg-info", "twice-dist"), ("site", "dist-info", second_name)):
        install(tmp_path / folder, source, name="twice", distribution=distribution, module="twice_backend", form=form)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
    found = [f for f in plugins.discover() if f.name == "twice"]
    assert [(f.target, f.conflicts) for f in found] == [("twice_backend:Fake", ())]
    assert plugins.select("twice").name == "twice"


def test_u72_the_backend_that_comes_along_is_listed_once_from_a_clone():
    assert [f.name for f in plugins.discover()].count("cpu") == 1
