"""U81, its half without collectives: a spawned worker loads exactly its parent's plugin, or says why it cannot."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pickle
import sys
import types

import pytest

from pagedkv import plugins
from pagedkv.api.errors import BackendLoadError, BackendNotFound, BackendUnavailable
from pagedkv.plugins import Identity
from tests.helpers.plugin_dists import descriptor, install
from tests.helpers.workers import in_worker

TWO = "def probe(self): return tuple(DeviceInfo(index=i, kind='k', score=9 - i) for i in (0, 1))"


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """(the folder with the plugin, what the parent chose)."""
    site = install(tmp_path / "site", descriptor("mine", probe=TWO), name="mine", distribution="mine-dist")
    monkeypatch.syspath_prepend(str(site))
    return site, plugins.select("mine").identity


def test_an_identity_is_small_and_can_be_pickled(parent):
    _, identity = parent
    assert identity == Identity(name="mine", distribution="mine-dist", version="1.5", device=0)
    assert pickle.loads(pickle.dumps(identity)) == identity and len(pickle.dumps(identity)) < 300
    with pytest.raises(dataclasses.FrozenInstanceError):
        identity.name = "other"


def test_u81_a_worker_loads_exactly_that_plugin_and_detects_nothing(parent, tmp_path, monkeypatch):
    site, identity = parent
    better = install(tmp_path / "better", descriptor("better", score=99), name="better", distribution="better-dist")
    monkeypatch.setenv("PAGEDKV_BACKEND", "better")
    wanted = dataclasses.replace(identity, device=1)
    answer = in_worker(wanted, site, better)
    assert answer["identity"] == wanted and answer["why"] == "chosen by the parent process"
    assert [name for name in answer["imported"] if "better" in name or "cpu" in name] == []


def test_u81_a_worker_without_it_says_what_to_do(parent):
    answer = in_worker(parent[1])
    assert answer["error"] == "BackendNotFound"
    assert "'mine' (mine-dist 1.5)" in answer["text"] and "not installed in this worker process" in answer["text"]


def test_u81_another_version_in_the_worker_is_refused_with_both(parent, tmp_path):
    other = install(tmp_path / "v2", descriptor("mine"), name="mine", distribution="mine-dist", version="2.0")
    answer = in_worker(parent[1], other)
    assert answer["error"] == "BackendLoadError"
    assert "this worker process has backend 'mine' (mine-dist 2.0)" in answer["text"]
    assert "its parent process uses backend 'mine' (mine-dist 1.5)" in answer["text"]


class OnlyHere(importlib.metadata.Distribution):
    """A backend that a program registers by a call, without installing anything."""

    def read_text(self, filename):
        return {
            "METADATA": "Metadata-Version: 2.1\nName: only-here-dist\nVersion: 0.1\n",
            "entry_points.txt": "[pagedkv.backends]\nonly-here = only_here_module:Fake\n",
        }.get(filename)

    def locate_file(self, path):
        return path


class Finder(importlib.metadata.DistributionFinder):
    def find_spec(self, *_):
        return None

    def find_distributions(self, context=None):
        return [OnlyHere()]


def test_u81_a_backend_registered_only_in_the_parent_is_unknown_to_workers(monkeypatch):
    module = types.ModuleType("only_here_module")
    exec(descriptor("only-here"), vars(module))
    monkeypatch.setitem(sys.modules, "only_here_module", module)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    identity = plugins.select("only-here").identity
    answer = in_worker(identity)
    assert answer["error"] == "BackendNotFound"
    assert "registered only inside the parent process is unknown to its workers" in answer["text"]
    assert "install it as a distribution (pip install)" in answer["text"]
    assert "'cpu'" in answer["text"].partition("installed here: ")[2]


# -- the same rules without a process ----------------------------------------------------------------------------------


def test_another_distribution_under_the_name_is_refused_with_both(parent):
    with pytest.raises(
        BackendLoadError, match=r"has backend 'mine' \(mine-dist 1\.5\).*uses backend 'mine' \(other 1\.5\)"
    ):
        plugins.reselect(dataclasses.replace(parent[1], distribution="other"))


def test_the_spelling_of_a_distribution_does_not_matter(parent):
    assert plugins.reselect(dataclasses.replace(parent[1], distribution="Mine_Dist")).name == "mine"


def test_a_device_that_is_not_there_is_unavailable(parent):
    with pytest.raises(BackendUnavailable, match=r"chosen by the parent process.*no device 7; its devices: 0, 1"):
        plugins.reselect(dataclasses.replace(parent[1], device=7))


def test_two_claims_of_the_name_in_the_worker_are_told(parent, tmp_path, monkeypatch):
    install(tmp_path / "again", descriptor("mine"), name="mine", distribution="again-dist")
    monkeypatch.syspath_prepend(str(tmp_path / "again"))
    with pytest.raises(BackendLoadError, match=r"(?s)claimed more than once.*again-dist 1\.5.*mine-dist 1\.5"):
        plugins.reselect(parent[1])


def test_an_unknown_name_says_which_are_here():
    identity = Identity(name="nosuch", distribution="d", version="1", device=0)
    with pytest.raises(BackendNotFound) as caught:
        plugins.reselect(identity)
    assert caught.value.name == "nosuch" and "cpu" in caught.value.known
