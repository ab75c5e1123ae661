"""What the kit's sections stand on: the refusal helper, the plugin-loading child, the tiny model, complete samples."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from pagedkv.api import Batch, ContractViolation, UnsupportedError
from pagedkv.conformance import gated, loading_child
from pagedkv.conformance.refusals import refuses
from pagedkv.conformance.tiny_model import TinyConfig, TinyLlama

CONFIG = TinyConfig(head_dim=16, q_heads=6, kv_heads=2, dtype="fp32", max_length=128)


def message(error: BaseException | None, *naming: object) -> str:
    """What `refuses(UnsupportedError, ...)` says when the block raises `error`; empty when it is content."""
    try:
        with refuses(UnsupportedError, "the call", *naming):
            if error is not None:
                raise error
    except pytest.fail.Exception as failure:
        return str(failure)
    return ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, "it was accepted"),
        (NotImplementedError("later"), "NotImplementedError: later; UnsupportedError"),
        (IndexError("3"), "IndexError"),
        (ContractViolation("no"), "it raised ContractViolation: no"),
        (UnsupportedError("dtype fp64 is unknown"), "does not name fp65"),
    ],
)
def test_a_refusal_that_is_none_is_named(error, said):
    assert said in message(error, "fp65")


def test_a_refusal_that_names_everything_is_one():
    assert message(UnsupportedError(["dtype fp64", "block size 7"]), "fp64", 7) == ""


def test_every_gated_field_is_tried_by_the_honesty_section():
    assert set(gated.SAMPLES) == set(gated.gated_fields())
    assert set(gated.gated_fields().values()) <= set(gated.FEATURES)
    batch = {f.metadata["feature"] for f in dataclasses.fields(Batch) if "feature" in f.metadata}
    assert batch == {"multi_token_decode"}  # test_undeclared_batch_field; a new one needs a case there


# -- the loading child -------------------------------------------------------------------------------------------------

DESCRIPTOR = """
import sys, os
from pagedkv.api import DeviceInfo
{imports}
class Fake:
    def probe(self):
        {probe}
        return (DeviceInfo(index=0, kind="fake"),)
    def describe(self, device):
        return None
"""


def seen(tmp_path, imports="", probe="pass", name="fake_backend"):
    """What the child says of a plugin with these lines."""
    (tmp_path / f"{name}.py").write_text(DESCRIPTOR.format(imports=imports, probe=probe))
    (tmp_path / "something_else.py").write_text("")
    asked = json.dumps({"target": f"{name}:Fake", "path": [str(tmp_path), *sys.path]})
    done = subprocess.run([sys.executable, loading_child.__file__, asked], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_child_finds_nothing_in_a_plugin_that_keeps_the_laws(tmp_path):
    found = seen(tmp_path, imports="import numpy, ctypes, sqlite3")
    assert found["imported"] == found["devices"] == found["frameworks"] == found["environment"] == []
    assert (found["indices"], found["raised"]) == ([[0], [0]], "")
    assert found["import_ms"] > 0 and found["probe_ms"] > 0


def test_the_child_finds_every_broken_law(tmp_path):
    imports = "import something_else\nimport pagedkv.config\nos.environ['FAKE'] = '1'"
    found = seen(tmp_path, imports=imports, probe="open('/dev/full', 'w').close(); import torch")
    assert {"something_else", "pagedkv.config"} <= set(found["imported"])
    assert found["frameworks"] == ["torch"]
    assert found["environment"] == ["FAKE"]
    if sys.platform == "linux":
        assert found["devices"] == ["/dev/full"]


def test_the_package_of_a_descriptor_that_is_extended_counts_as_the_plugins_own(tmp_path):
    (tmp_path / "base_backend.py").write_text(
        "from pagedkv.api import Descriptor\nclass Base(Descriptor): create = None\n"
    )
    (tmp_path / "mixed_in.py").write_text("class Other: pass\n")
    extends = "from base_backend import Base\nfrom mixed_in import Other\nclass Like(Base, Other): pass"
    (tmp_path / "extending.py").write_text(
        DESCRIPTOR.format(imports=extends, probe="pass").replace("Fake:", "Fake(Like):")
    )
    asked = json.dumps({"target": "extending:Fake", "path": [str(tmp_path), *sys.path]})
    done = subprocess.run([sys.executable, loading_child.__file__, asked], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout.splitlines()[-1])["imported"] == ["mixed_in"]
    assert seen(tmp_path, imports="import base_backend")["imported"] == ["base_backend"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows which files are open")
def test_the_child_finds_a_device_that_stays_open(tmp_path):
    found = seen(tmp_path, probe="sys.kept = os.dup(os.open('/dev/full', os.O_RDWR))")
    assert "/dev/full" in found["devices"]


def test_the_child_reports_what_probe_raises(tmp_path):
    found = seen(tmp_path, probe="raise SystemExit('no driver')")
    assert found["raised"] == "SystemExit: no driver"


@pytest.mark.parametrize(
    ("path", "is_one"), [("/dev/null", False), ("/dev/full", True), ("/etc/passwd", False), ("/dev/no/such", False)]
)
@pytest.mark.skipif(sys.platform != "linux", reason="device files by their Linux names")
def test_what_counts_as_a_device(path, is_one):
    assert loading_child.is_device(path) is is_one


# -- the tiny model ----------------------------------------------------------------------------------------------------


def test_the_tiny_model_is_what_transformers_computes(tmp_path):
    from transformers import AutoModelForCausalLM

    made = TinyLlama(CONFIG)
    theirs = AutoModelForCausalLM.from_pretrained(made.save(tmp_path), dtype=torch.float64)
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab, 40)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(ids)[None]).logits[0].double().numpy()
    assert np.abs(made.logits(ids) - wanted).max() < 1e-5  # transformers takes its rotary angles in float32


def test_the_tiny_model_looks_at_its_whole_context():
    made, ids = TinyLlama(CONFIG), np.random.default_rng(2).integers(0, CONFIG.vocab, 40)
    other = ids.copy()
    other[0] = (other[0] + 1) % CONFIG.vocab
    last, changed = made.logits(ids)[-1], made.logits(other)[-1]
    assert np.abs(last - changed).max() > 1e-2
    assert np.allclose(made.logits(ids)[:30], made.logits(ids[:30]), rtol=0, atol=1e-9)
