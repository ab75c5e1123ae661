"""Discovery, probing, selection and creation, with real distributions on the path."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import pagedkv.api
from pagedkv import environment, plugins
from pagedkv.api.errors import (
    BackendLoadError,
    BackendNotFound,
    BackendUnavailable,
    BackendVersionError,
    ConfigError,
)
from pagedkv.checking import CheckedBackend
from pagedkv.plugins import discovery
from pagedkv.plugins.probing import capabilities_from_json, capabilities_to_json
from tests.helpers.plugin_dists import descriptor, install, wheel


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    environment._warn_of_variable.cache_clear()


@pytest.fixture
def offer(tmp_path, monkeypatch):
    """Install one plugin into a folder of its own on sys.path."""

    def add(source: str, name: str = "fake", **kwargs) -> Path:
        folder = tmp_path / f"site{len(list(tmp_path.glob('site*')))}"
        install(folder, source, name=name, **kwargs)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return add


def status(name: str = "fake", **kwargs) -> plugins.Status:
    (only,) = plugins.probe_all([name], **kwargs)
    return only


# -- discovery ---------------------------------------------------------------------------------------------------------


def test_a_backend_is_listed_from_metadata_without_importing_it(offer):
    offer("raise RuntimeError('imported')")
    (found,) = [f for f in plugins.discover() if f.name == "fake"]
    assert (found.distribution, found.version, found.conflicts) == ("pagedkv-fake", "1.5", ())
    assert found.target.startswith("pagedkv_fake_") and found.target.endswith(":Fake")


def test_a_damaged_distribution_hides_no_other(offer, tmp_path, monkeypatch, caplog):
    damaged = tmp_path / "damaged"
    (damaged / "broken-1.0.dist-info").mkdir(parents=True)
    (damaged / "broken-1.0.dist-info" / "METADATA").write_text("Name: broken\nVersion: 1.0\n")
    (damaged / "broken-1.0.dist-info" / "entry_points.txt").write_bytes(b"[pagedkv.backends]\nno equals sign \xff\n")
    monkeypatch.syspath_prepend(str(damaged))
    offer(descriptor())
    assert "fake" in [f.name for f in plugins.discover()]
    assert "cannot be read" in caplog.text


def test_one_name_from_two_distributions_is_a_conflict_that_names_both(offer):
    offer(descriptor(), distribution="first-dist")
    offer(descriptor(), distribution="second-dist", version="2.0")
    row = status()
    assert row.status == "conflict"
    for ask in (lambda: plugins.select("fake"), lambda: plugins.load(plugins.find("fake"))):
        with pytest.raises(BackendLoadError, match=r"(?s)second-dist 2\.0.*first-dist 1\.5.*uninstall"):
            ask()
    assert "first-dist 1.5" in row.reasons[0] and "second-dist 2.0" in row.reasons[0]


def test_an_install_hint_is_part_of_the_error_for_a_known_name(monkeypatch):
    hints = discovery.read_hints("[backends]\nWarp = \"pip install '.[warp]' in the clone\"\n")
    monkeypatch.setattr(discovery, "install_hints", lambda: hints)
    with pytest.raises(BackendNotFound, match=r"pip install '\.\[warp\]' in the clone"):
        plugins.find("warp")
    assert "pip install" in discovery.read_hints(Path("pagedkv/install_hints.toml").read_text())["cpu"]


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raising", "said"),
    [
        ("import no_such_library_of_a_vendor", "ModuleNotFoundError: No module named 'no_such_library_of_a_vendor'"),
        ("assert False, 'driver too old'", "AssertionError: driver too old"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise BaseException('odd')", "BaseException: odd"),
        ("def broken(:", "SyntaxError"),
    ],
)
def test_whatever_a_plugin_raises_at_import_is_its_load_error(offer, raising, said):
    offer(raising)
    with pytest.raises(BackendLoadError, match=r"pagedkv-fake 1\.5") as caught:
        plugins.select("fake")
    assert said in str(caught.value) and "pip uninstall pagedkv-fake" in str(caught.value)
    assert (caught.value.distribution, caught.value.version) == ("pagedkv-fake", "1.5")
    assert type(caught.value.cause).__name__ == said.split(":")[0]


def test_ctrl_c_while_a_plugin_loads_is_no_load_error(offer):
    offer("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        plugins.load(plugins.find("fake"))


def test_a_load_error_ends_neither_discovery_nor_the_other_backends(offer):
    offer("raise SystemExit(0)")
    offer(descriptor("other"), name="other", distribution="other-dist")
    assert [(s.name, s.status) for s in plugins.probe_all(["fake", "other"])] == [("fake", "failed"), ("other", "ok")]


@pytest.mark.parametrize(
    ("api", "extra", "loads"),
    [
        ("(1, 0)", "", True),
        ("(1, 99)", "requires_api_minor = 0", True),
        ("(1, 99)", "", False),
        ("(2, 0)", "", False),
        ("(2, 0)", "requires_api_minor = 0", False),
        ("(0, 9)", "", False),
    ],
)
def test_the_version_handshake_compares_majors_and_the_required_minor(offer, api, extra, loads):
    offer(descriptor(api=api, diagnose=extra or "pass"))
    if loads:
        assert plugins.load(plugins.find("fake")).name == "fake"
        return
    version = api.strip("()").replace(", ", ".")
    with pytest.raises(BackendVersionError, match=rf"contract {version}.*speaks contract 1\.1"):
        plugins.load(plugins.find("fake"))


def test_a_refused_version_stands_in_the_listing(offer):
    offer(descriptor(api="(2, 0)"))
    row = status()
    assert (row.status, row.api) == ("failed", "2.0") and "speaks contract 1.1" in row.reasons[0]


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"api": None}, "api is None"),
        ({"api": "'1.0'"}, "api is '1.0'"),
        ({"name": "name = 'other'"}, "name is 'other', must be the entry point's 'fake'"),
        ({"without": ("name",)}, "name is None"),
        ({"without": ("create",)}, "method create is missing"),
        ({"probe": "probe = 3"}, "method probe is missing"),
        ({"without": ("probe", "describe")}, "method probe is missing; method describe is missing"),
        ({"options": "options = ('level',)"}, "options is ('level',)"),
    ],
)
def test_what_a_descriptor_lacks_is_named_at_load(offer, kwargs, said):
    offer(descriptor(**kwargs))
    with pytest.raises(BackendLoadError) as caught:
        plugins.load(plugins.find("fake"))
    assert said in str(caught.value)


def test_a_class_that_is_no_descriptor_is_refused(offer):
    offer("class Fake:\n    name, api = 'fake', (1, 0)\n")
    with pytest.raises(BackendLoadError, match=r"no subclass of pagedkv\.api\.Descriptor.*method probe is missing"):
        plugins.load(plugins.find("fake"))


def test_an_optional_member_may_be_missing_and_an_extra_one_is_ignored(offer):
    offer(descriptor(without=("diagnose", "options"), _own="def _own(self): return 1"))
    loaded = plugins.load(plugins.find("fake"))
    assert dict(loaded.diagnose()) == {} and loaded.options == ()


@pytest.mark.parametrize(
    "patch",
    [
        "import pagedkv.api\npagedkv.api.needs = lambda record: ()",
        "import pagedkv.api.records as r\nr.Record.of = classmethod(lambda cls, **fields: None)",
        "import pagedkv.api\ndel pagedkv.api.needs",
        "import pagedkv.plugins\npagedkv.plugins.select = None",
    ],
)
def test_a_plugin_that_replaces_a_function_of_ours_is_refused_by_name(offer, patch):
    before = (pagedkv.api.needs, vars(pagedkv.api.records.Record)["of"], plugins.select)
    offer(patch + "\n" + descriptor())
    with pytest.raises(BackendLoadError, match=r"pagedkv-fake.* replaced pagedkv\.(api|plugins)"):
        plugins.load(plugins.find("fake"))
    assert (pagedkv.api.needs, vars(pagedkv.api.records.Record)["of"], plugins.select) == before


# -- probing -----------------------------------------------------------------------------------------------------------


def test_a_probe_answers_with_devices_capabilities_and_diagnosis(offer):
    offer(descriptor())
    row = status(diagnose=True)
    assert (row.status, row.api, row.score, dict(row.diagnose)) == ("ok", "1.0", 60, {"driver": "7.1"})
    (device,) = row.devices
    assert (device.index, device.kind, device.total, device.free) == (0, "fake card", 100, 50)
    (capabilities,) = row.capabilities
    assert capabilities is not None
    assert capabilities.block_sizes == (frozenset({8, 16}), (32, 32, 128))
    assert capabilities.exclusions[0][0]["block_size"] == (8, 8, 16)
    assert capabilities_from_json(capabilities_to_json(capabilities)) == capabilities


def test_the_parent_imports_no_probed_plugin(offer):
    folder = offer(descriptor())
    status()
    assert not [m for m in sys.modules.values() if str(folder) in str(getattr(m, "__file__", ""))]


def test_a_megabyte_on_both_outputs_does_not_disturb_the_answer(offer):
    offer(descriptor(top="print('x' * 1_000_000, flush=True); sys.stderr.write('y' * 1_000_000); os.write(1, b'{}')"))
    assert status().status == "ok"


def test_a_probe_that_hangs_is_a_timeout_and_dies_with_its_children(offer, tmp_path):
    pid = tmp_path / "pid"
    hang = f"""
        def probe(self):
            import subprocess
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            open({str(pid)!r}, "w").write(str(child.pid))
            print("waiting for the card", flush=True)
            time.sleep(60)
    """
    offer(descriptor(probe=hang))
    offer(descriptor("other"), name="other", distribution="other-dist")
    start = time.monotonic()
    hung, fine = plugins.probe_all(["fake", "other"], timeout=1.0)
    assert time.monotonic() - start < 15
    assert (hung.status, fine.status) == ("timeout", "ok")
    assert "within 1 s" in hung.reasons[0] and "waiting for the card" in hung.reasons[0]
    assert _gone(int(pid.read_text()))


def _gone(pid: int) -> bool:
    """Ended, or a zombie that nobody has reaped yet."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_probe_that_ends_its_process_is_a_failed_row_with_the_reason(offer):
    offer(descriptor("crash", probe="def probe(self): os.kill(os.getpid(), 11)"), name="crash", distribution="d1")
    offer(descriptor("exits", probe="def probe(self): print('bye'); sys.stdout.flush(); os._exit(7)"), name="exits")
    crash, exits = plugins.probe_all(["crash", "exits"])
    assert (crash.status, exits.status) == ("failed", "failed")
    assert "signal SIGSEGV" in crash.reasons[0]
    assert "exit code 7; its last output: ...bye" in exits.reasons[0]


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"probe": "def probe(self): raise OSError('no driver')"}, "probing raised OSError: no driver"),
        ({"probe": "def probe(self): return None"}, "probe() returned None, must return a tuple of DeviceInfo"),
        ({"probe": "def probe(self): return (DeviceInfo(index='0', kind='x', score=1),)"}, "index is '0'"),
    ],
)
def test_a_probe_that_raises_or_returns_something_else_is_a_load_error(offer, kwargs, said):
    offer(descriptor(**kwargs))
    with pytest.raises(BackendLoadError) as caught:
        plugins.select("fake")
    assert said in str(caught.value)


def test_a_description_of_the_wrong_type_is_a_failed_row(offer):
    offer(descriptor(describe="def describe(self, device): return {}"))
    row = status()
    assert row.status == "failed" and "describe() returned {}, must return Capabilities" in row.reasons[0]


def test_a_diagnosis_that_raises_leaves_the_backend_usable(offer):
    offer(descriptor(diagnose="def diagnose(self): raise OSError('gone')"))
    row = status(diagnose=True)
    assert row.status == "ok" and "OSError: gone" in row.diagnose["diagnose"]


# -- selection ---------------------------------------------------------------------------------------------------------


def test_no_device_and_a_missing_extra_are_unavailable_with_the_reason(offer):
    offer(descriptor(probe="def probe(self): return ()"))
    offer(descriptor("bare", score=0, reason="pip install 'bare[all]'"), name="bare", distribution="bare-dist")
    assert [(s.status, s.reasons) for s in plugins.probe_all(["fake", "bare"])] == [
        ("unavailable", ("it sees no device",)),
        ("unavailable", ("device 0 (fake card): pip install 'bare[all]'",)),
    ]
    with pytest.raises(BackendUnavailable, match=r"pip install 'bare\[all\]'"):
        plugins.select("bare")
    with pytest.raises(BackendUnavailable, match="it sees no device"):
        plugins.select("fake")


def test_score_zero_without_a_reason_is_taken_by_name_only(offer):
    offer(descriptor(score=0))
    row = status()
    assert row.status == "ok" and plugins.rank([row]) == []
    assert plugins.select("fake").explicit


def test_the_best_device_is_taken_and_an_index_chooses_another(offer):
    two = (
        "def probe(self): return tuple(DeviceInfo(index=i, kind='k', score=s) for i, s in ((0, 10), (3, 80), (4, 80)))"
    )
    offer(descriptor(probe=two))
    assert plugins.select("fake").device.index == 3
    assert plugins.select("fake", device=0).device.index == 0
    assert plugins.select(device=4).device.index == 4
    with pytest.raises(BackendUnavailable, match="no device 2; its devices: 0, 3, 4"):
        plugins.select("fake", device=2)
    for wrong in (-1, True, "0"):
        with pytest.raises(ConfigError, match="device must be a whole number"):
            plugins.select("fake", device=wrong)


def test_selected_carries_what_workers_compare_and_cannot_be_changed(offer):
    offer(descriptor())
    chosen = plugins.select(" Fake ")
    assert (chosen.name, chosen.distribution, chosen.version) == ("fake", "pagedkv-fake", "1.5")
    with pytest.raises(dataclasses.FrozenInstanceError):
        chosen.name = "other"


def test_a_plugin_that_loads_in_its_probe_only_is_left_out_with_a_warning(offer, caplog):
    child_only = "if 'pytest' in sys.modules: raise OSError('not here')"
    offer(descriptor(score=90, top=child_only))
    offer(descriptor("other", score=70), name="other", distribution="other-dist")
    assert plugins.select().name == "other"
    assert [r.levelname for r in caplog.records if "left out of the automatic choice" in r.message] == ["WARNING"]


# -- creation ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [("plan",), ("attend", "copy_blocks")])
def test_a_required_method_that_is_missing_is_named_at_creation(offer, missing):
    offer(descriptor(backend_without=missing))
    with pytest.raises(BackendLoadError) as caught:
        plugins.create(plugins.select("fake"), {})
    assert all(method in str(caught.value) for method in missing)


@pytest.mark.parametrize(
    ("create", "said"),
    [
        ("return object()", r"no pagedkv\.api\.AttentionBackend; method alloc_pool is missing.*method pool_cost"),
        ("import no_such_extra", "creating the backend raised ModuleNotFoundError"),
        ("b = FakeBackend(); type(b).capabilities = lambda self: 5; return b", r"capabilities\(\) returned 5"),
        ("import pagedkv.api as a; a.needs = None; return FakeBackend()", r"replaced pagedkv\.api\.needs"),
    ],
)
def test_a_wrong_instance_is_a_load_error(offer, create, said):
    offer(descriptor(create=f"def create(self, device, options, world): {create}"))
    with pytest.raises(BackendLoadError, match=said):
        plugins.create(plugins.select("fake"), {})


def test_our_own_errors_pass_creation_unchanged(offer):
    raising = "from pagedkv.api import BackendUnavailable; raise BackendUnavailable('busy')"
    offer(descriptor(create=f"def create(self, device, options, world): {raising}"))
    with pytest.raises(BackendUnavailable, match=r"^busy$"):
        plugins.create(plugins.select("fake"), {})


def test_options_are_checked_completed_and_renamed_before_creation(offer, caplog):
    offer(descriptor(create="def create(self, device, options, world): b = FakeBackend(); b.got = options; return b"))
    chosen = plugins.select("fake")
    assert plugins.create(chosen, {}).got == {"level": 3}
    assert plugins.create(chosen, {"depth": 5}).got == {"level": 5}
    assert "depth is called level today" in caplog.text
    for wrong in ({"level": "5"}, {"level": True}, {"level": None}, {"level": 1.0}):
        with pytest.raises(ConfigError, match="'level' must be int"):
            plugins.create(chosen, wrong)
    with pytest.raises(ConfigError, match="no option 'levl'; did you mean 'level'"):
        plugins.create(chosen, {"levl": 5})
    with pytest.raises(ConfigError, match="given twice"):
        plugins.create(chosen, {"level": 5, "depth": 5})


def test_options_from_a_command_line_are_converted(offer):
    kinds = "options = tuple(Option(name=t.__name__, type=t, default=t(), help='h') for t in (int, float, bool, str))"
    offer(descriptor(options=kinds))
    fake = plugins.load(plugins.find("fake"))
    texts = ["int=4", "float=0.5", "bool=off", "str=a=b"]
    assert plugins.parse_options(fake, texts) == {"int": 4, "float": 0.5, "bool": False, "str": "a=b"}
    for wrong in ("int=x", "bool=perhaps", "int", "nosuch=1"):
        with pytest.raises(ConfigError):
            plugins.parse_options(fake, [wrong])


def test_the_check_variable_wraps_the_backend_and_says_so(offer, monkeypatch, caplog):
    offer(descriptor())
    for value, wrapped in (("1", True), ("0", False), ("", False)):
        caplog.clear()
        monkeypatch.setenv("PAGEDKV_CHECK", value)
        made = plugins.create(plugins.select("fake"), {})
        assert isinstance(made, CheckedBackend) is wrapped
        assert ("every call of backend fake is checked" in caplog.text) is wrapped


# -- the backend that comes along --------------------------------------------------------------------------------------


def test_the_cpu_backend_is_found_and_chosen_automatically():
    pytest.importorskip("pagedkv_cpu.descriptor", reason="the cpu backend is not built yet")
    (row,) = plugins.probe_all(["cpu"])
    assert (row.status, row.distribution, row.reasons) == ("ok", "pagedkv", ())
    chosen = plugins.select()
    assert (chosen.name, chosen.explicit) == ("cpu", False)


def test_a_wheel_installed_by_pip_is_found_probed_and_chosen(tmp_path):
    file = wheel(tmp_path, descriptor("wheeled"), name="wheeled", distribution="pagedkv-wheeled")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--target", str(site), str(file)], check=True)
    script = "from pagedkv import plugins; s = plugins.select(); print(s.name, s.distribution, s.version, s.explicit)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["wheeled", "pagedkv-wheeled", "0.3", "False"]


def test_the_automatic_table_is_logged_once_with_a_line_for_each_rejected_backend(offer, caplog):
    offer(descriptor(score=90))
    offer(descriptor("lesser", score=70), name="lesser", distribution="lesser-dist")
    offer(descriptor("absent", score=0, reason="no card"), name="absent", distribution="absent-dist")
    offer("import no_such_thing", name="broken", distribution="broken-dist")
    caplog.set_level(logging.INFO, logger="pagedkv")
    plugins.select()
    lines = {name: [r for r in caplog.records if f"backend {name} (" in r.message] for name in ("lesser", "absent")}
    assert [r.levelname for r in lines["lesser"] + lines["absent"]] == ["INFO", "INFO"]
    assert "no card" in lines["absent"][0].message and "after fake" in lines["lesser"][0].message
    (broken,) = [r for r in caplog.records if "backend broken (" in r.message]
    assert broken.levelname == "WARNING" and "No module named 'no_such_thing'" in broken.message
