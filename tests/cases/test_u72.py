"""U72: an editable install is seen twice, as egg-info in the working folder and as dist-info; it counts once."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagedkv import plugins
from pagedkv.api.errors import BackendLoadError
from tests.helpers.plugin_dists import descriptor, install, source_tree, wheel
from tests.helpers.wheels import install_wheel, install_wheels


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


def test_u72_an_editable_install_counts_once_beside_its_own_folder(tmp_path, monkeypatch):
    """A real one: the build backend's editable wheel, installed by pip, and the source folder with its egg-info."""
    source = source_tree(
        tmp_path / "work", descriptor("edited", score=0), name="edited", distribution="edited-dist", version="0.4"
    )
    for step in (
        f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})",
        "import sys, setuptools; sys.argv = ['setup.py', 'egg_info']; setuptools.setup()",
    ):
        subprocess.run([sys.executable, "-c", step], cwd=source, check=True, capture_output=True)
    (editable,) = tmp_path.glob("*.whl")
    site = install_wheel(editable, tmp_path / "site")
    assert list(source.glob("*.egg-info")) and list(site.glob("*.dist-info")), "seen twice"
    # What the installed .pth file does in a site folder: the source folder is on the path.
    for folder in (source, site):
        monkeypatch.syspath_prepend(str(folder))
    found = [f for f in plugins.discover() if f.name == "edited"]
    assert [(f.distribution, f.version, f.conflicts) for f in found] == [("edited-dist", "0.4", ())]
    assert plugins.select("edited").version == "0.4"
    (row,) = plugins.probe_all(["edited"])
    assert row.status == "ok"


def test_u72_one_name_from_two_distributions_is_one_row_and_an_error_that_names_both(tmp_path, monkeypatch):
    wheels = [wheel(tmp_path, descriptor("both"), name="both", distribution=f"both-{which}") for which in ("a", "b")]
    monkeypatch.syspath_prepend(str(install_wheels(wheels, tmp_path / "site")))
    (row,) = plugins.probe_all(["both"])
    assert row.status == "conflict" and "both-a 0.3" in row.reasons[0] and "both-b 0.3" in row.reasons[0]
    with pytest.raises(BackendLoadError) as caught:
        plugins.select("both")
    assert "both-a 0.3" in str(caught.value) and "both-b 0.3" in str(caught.value)
    assert "pip uninstall" in str(caught.value)
