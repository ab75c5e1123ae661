"""Installed plugins that are wrong in every way: each is told by name, and none harms another backend or pagedkv."""

from __future__ import annotations

import json
import logging
import sys
import threading

import pytest
from click.testing import CliRunner

import pagedkv.api
from pagedkv import LLM, plugins
from pagedkv.api.errors import BackendLoadError, EngineDead
from pagedkv.cli import backends as cli
from pagedkv.cli.main import pagedkv as command
from pagedkv.plugins import selection
from pagedkv.plugins.loading import Watch
from tests.helpers.broken_plugins import (
    BROKEN,
    EVERYONE,
    PATCH,
    PROBED,
    distribution,
    site,
    statuses,
)
from tests.helpers.engine_rig import SETTINGS, folder, greedy
from tests.helpers.plugin_dists import install

NEEDS = pagedkv.api.needs


@pytest.fixture(autouse=True)
def _installed(monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.syspath_prepend(str(site()))
    monkeypatch.setattr(selection, "PROBE_LIMIT", 0.2)
    yield
    assert pagedkv.api.needs is NEEDS


@pytest.fixture(scope="module")
def listing():
    """What `pagedkv backends --json` prints of the statuses that the child processes gave, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "probe_all", lambda: list(statuses()))
        result = CliRunner().invoke(command, ["backends", "--json"])
    assert result.exit_code == 0
    return {row["name"]: row for row in json.loads(result.stdout)}


@pytest.mark.parametrize("name", PROBED)
def test_the_listing_has_its_row_with_the_reason(listing, name):
    wrong, row = EVERYONE[name], listing[name]
    assert (row["status"], row["distribution"], row["version"]) == (wrong.status, distribution(name), "0.3")
    assert wrong.said in "\n".join(row["reasons"])


def test_the_listing_of_the_others_is_as_without_them(listing):
    assert (listing["cpu"]["status"], listing["cpu"]["distribution"], listing["cpu"]["reasons"]) == (
        "ok",
        "pagedkv",
        [],
    )


@pytest.mark.parametrize("name", [name for name, wrong in BROKEN.items() if wrong.selecting])
def test_an_explicit_choice_is_an_error_that_names_it(name):
    with pytest.raises(BackendLoadError) as caught:
        plugins.select(name)
    assert BROKEN[name].selecting in str(caught.value)
    assert f"{distribution(name)} 0.3" in str(caught.value)
    assert f"pip uninstall {distribution(name)}" in str(caught.value)


@pytest.mark.parametrize("name", ["describe-dict", "describe-wrong", "describe-raises", "patches-describe"])
def test_a_description_is_checked_before_the_engine_uses_it(name):
    with pytest.raises(BackendLoadError) as caught:
        plugins.offer(plugins.select(name))
    assert BROKEN[name].said in str(caught.value)


@pytest.mark.parametrize("name", [name for name, wrong in BROKEN.items() if wrong.creating])
def test_a_wrong_instance_is_an_error_that_names_it(name):
    with pytest.raises(BackendLoadError) as caught:
        plugins.create(plugins.select(name))
    assert BROKEN[name].creating in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cost-none", "pool_cost() returned 4096, must return PoolCost"),
        ("cost-wrong", "per_block is 0, must be a whole number of bytes from 1 on; fixed is 1.5, must be"),
        ("patches-pool", "computing the cost of a pool replaced pagedkv.api.needs"),
        ("describe-wrong", "block_sizes is (16,), must be"),
    ],
)
def test_what_the_engine_asks_of_it_is_checked_as_well(name, said):
    with pytest.raises(BackendLoadError) as caught:
        LLM(folder(), backend=name, num_blocks=9)
    assert said in str(caught.value) and f"backend {name!r}" in str(caught.value)


def late(method: str) -> str:
    """A backend that computes, and replaces a function of ours in one of its methods."""
    return f"""
from pagedkv_cpu.descriptor import CpuDescriptor


class Fake(CpuDescriptor):
    name = "late"

    def create(self, device, options, world):
        backend = super().create(device, options, world)

        class Own(type(backend)):
            def {method}(self, *args, **names):
                {PATCH}
                return super().{method}(*args, **names)

        backend.__class__ = Own
        return backend
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    def start(method: str) -> LLM:
        install(tmp_path, late(method), name="late", distribution="late-dist")
        monkeypatch.syspath_prepend(str(tmp_path))
        return LLM(folder(), **SETTINGS | {"backend": "late"})

    return start


def test_a_function_that_is_replaced_while_the_engine_starts_is_put_back_and_told(start):
    with pytest.raises(BackendLoadError, match=r"late-dist 1\.5.* starting the engine replaced pagedkv\.api\.needs"):
        start("alloc_pool")


def test_one_that_is_replaced_in_a_step_is_told_when_calls_are_checked(start, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CHECK", "1")
    with start("attend") as llm, pytest.raises(EngineDead, match=r"attend\(\) replaced pagedkv\.api\.needs"):
        llm.generate([[1, 2, 3]], greedy(2), use_tqdm=False)


def test_what_somebody_else_replaced_is_not_the_plugins_doing(monkeypatch):
    watch = Watch(plugins.find("cpu"))
    monkeypatch.setattr(pagedkv.api, "needs", None)
    with watch.over("a call"):
        pass
    assert pagedkv.api.needs is None
    monkeypatch.undo()


def test_ctrl_c_passes():
    with pytest.raises(KeyboardInterrupt):
        plugins.select("import-interrupt")


def test_a_noisy_one_can_be_chosen():
    assert plugins.select("probe-noisy").device.score == 7


def test_a_probe_that_hangs_leaves_no_thread_that_keeps_the_program_alive():
    with pytest.raises(BackendLoadError):
        plugins.select("probe-hangs")
    left = [thread for thread in threading.enumerate() if thread.name == "pagedkv-probe"]
    assert left and all(thread.daemon for thread in left)


@pytest.mark.parametrize(("name", "code"), [("import-exit", 1), ("v2-0", 1), ("import-nothing", 2)])
def test_a_command_ends_with_the_reason_and_an_exit_code(name, code):
    result = CliRunner().invoke(command, ["generate", str(folder()), "--prompt", "x", "--backend", name])
    assert result.exit_code == code and result.stdout == ""
    assert f"error: backend {name!r}" in result.stderr or "no installed backend" in result.stderr


def test_the_automatic_choice_warns_once_of_each_and_takes_the_best_of_the_others(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="pagedkv")
    monkeypatch.setattr(selection, "probe_all", lambda: list(statuses()))
    chosen = plugins.select()
    assert (chosen.name, chosen.distribution, chosen.explicit) == ("cpu", "pagedkv", False)
    for name in PROBED:
        (line,) = [r for r in caplog.records if f"backend {name} ({distribution(name)} 0.3)" in r.getMessage()]
        assert line.levelname == ("INFO" if EVERYONE[name].status == "ok" else "WARNING")
        assert EVERYONE[name].said in line.getMessage()


def test_a_broken_one_that_is_not_chosen_stays_unimported(caplog):
    caplog.set_level(logging.INFO, logger="pagedkv")
    assert plugins.select("cpu").name == "cpu"
    here = str(site())
    mine = [m.__name__ for m in list(sys.modules.values()) if str(getattr(m, "__file__", "")).startswith(here)]
    chosen = {name.replace("-", "_") + "_dist" for name in EVERYONE}
    assert set(mine) <= chosen  # what other tests chose by name; none came with cpu
    assert "import_signal_dist" not in sys.modules and "import_hangs_dist" not in sys.modules
