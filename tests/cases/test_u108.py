"""U108: a vendor library is missing, and the message hides it; the first cause, its file and the way out are shown."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from pagedkv import plugins
from pagedkv.api.errors import BackendLoadError, BackendUnavailable
from pagedkv.cli.main import pagedkv
from pagedkv_ascend import opening
from pagedkv_ascend.descriptor import AscendDescriptor
from tests.backends.ascend import machine
from tests.helpers.fake_machine import stub_torch
from tests.helpers.plugin_dists import descriptor, install

CAUSE = "libatb.so: cannot open shared object file: No such file or directory"
SCRIPT = "source /usr/local/Ascend/nnal/atb/set_env.sh"


@pytest.fixture(autouse=True)
def _vendor(tmp_path, monkeypatch):
    monkeypatch.delenv("PAGEDKV_BACKEND", raising=False)
    monkeypatch.syspath_prepend(str(stub_torch(tmp_path / "torch")))
    source = descriptor("vendor", score=90, top="import vendor_torch_npu_stub")
    install(tmp_path / "site", source, name="vendor", distribution="vendor-dist")
    (tmp_path / "site" / "vendor_torch_npu_stub.py").write_text(f"raise ImportError({CAUSE!r})\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def test_u108_named_explicitly_the_message_contains_the_file():
    with pytest.raises(BackendLoadError, match=r"libatb\.so: cannot open"):
        plugins.select("vendor")


def test_u108_doctor_names_the_file_and_the_script_and_lists_the_toolkits_variables(monkeypatch, tmp_path):
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setenv("ATB_HOME_PATH", str(tmp_path / "gone"))
    result = CliRunner().invoke(pagedkv, ["doctor", "--backend", "vendor", "--json"])
    report = json.loads(result.stdout)
    first = report["findings"][0]
    assert result.exit_code == 2 and first["level"] == "broken" and CAUSE in first["why"]
    assert first["command"] == SCRIPT
    assert {"ASCEND_HOME_PATH", "ATB_HOME_PATH"} <= set(report["environment"])
    assert "unset ATB_HOME_PATH" in [finding["command"] for finding in report["findings"]]


def test_u108_beside_a_backend_that_works_it_is_a_warning():
    result = CliRunner().invoke(pagedkv, ["doctor"])
    assert result.exit_code == 1 and CAUSE in result.stdout and f"mend  {SCRIPT}" in result.stdout
    assert "would be chosen: cpu" in result.stdout


# -- the Ascend backend itself -----------------------------------------------------------------------------------------


@pytest.fixture
def npu(tmp_path, monkeypatch):
    """A machine with an NPU, torch-npu, and CANN as far as files go."""
    root = tmp_path / "machine"
    machine.driver(root)
    machine.bare(monkeypatch)
    machine.sourced(machine.cann(root), monkeypatch)
    machine.installed(monkeypatch, **machine.GOOD)
    monkeypatch.setattr(AscendDescriptor.__init__, "__defaults__", (root,))
    return root


def test_u108_a_library_that_is_not_there_is_named_before_anything_is_loaded(npu):
    (npu / machine.CANN / "lib64/libhccl.so").unlink()
    with pytest.raises(BackendUnavailable, match=r"is without libhccl\.so.*source \S+/cann/set_env\.sh"):
        plugins.select("ascend")


@pytest.mark.parametrize("wrapped", [False, True])
def test_u108_what_importing_the_extension_raises_ends_as_the_first_cause(npu, monkeypatch, wrapped):
    """Only importing shows what a library itself lacks: the file it cannot open is named, and the script."""

    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "torch_npu" and wrapped:
                raise RuntimeError("torch_npu does not work") from ImportError(CAUSE)
            if name == "torch_npu":
                raise ImportError(CAUSE)

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    with pytest.raises(BackendUnavailable) as caught:
        opening.load_torch_npu()
    assert str(caught.value) == f"torch-npu needs libatb.so of CANN ({CAUSE}): {SCRIPT}, or install CANN"
