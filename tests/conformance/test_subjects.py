"""Every backend of this repository passes the whole kit, and so does the plugin that was frozen with contract 1.0."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.conformance.certificate import Certificate
from pagedkv_cpu import native
from tests.helpers.wheels import install_wheel

ROOT = Path(__file__).resolve().parents[2]
FROZEN = ROOT / "tests" / "frozen" / "pagedkv_template-1.0.0-py3-none-any.whl"
FROZEN_SHA256 = "aace2d6f623bbcccaab725ea11750852291eee6e2b6b5a7cceba46aa40dc9bcc"

CPU_LEVELS = {"core", "copy", "canonical_kv", "lse", "collectives", "engine"}


@pytest.fixture(scope="module")
def frozen(tmp_path_factory) -> Path:
    """A folder that holds the frozen plugin, installed by pip from its wheel."""
    return install_wheel(FROZEN, tmp_path_factory.mktemp("frozen") / "site")


def certificate(name: str, folder: Path, *options: str, path: Path | None = None) -> Certificate:
    """What the whole kit says of a backend, run as its authors run it."""
    target = folder / f"{name}.json"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "pagedkv.conformance.plugin"]
    command += ["--pyargs", "pagedkv.conformance", "--backend", name, "--certificate", str(target), "-q", "--tb=short"]
    command += [word for option in options for word in ("--backend-option", option)]
    sites = os.pathsep.join(str(p) for p in (path, ROOT) if p)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": sites}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert target.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    found = Certificate.from_json(target.read_text("utf-8"))
    assert found.passed, done.stdout[-6000:]
    return found


def reached(found: Certificate) -> set[str]:
    return {level for level, verdict in found.levels().items() if verdict == "reached"}


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_the_cpu_backend_on_both_of_its_paths(kernels, tmp_path):
    if kernels == "native" and (reason := native.why_missing()):
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    assert reached(certificate("cpu", tmp_path, "threads=1", f"kernels={kernels}")) == CPU_LEVELS


@pytest.mark.parametrize("order", ["late", "early"])
def test_loopback_in_both_extreme_orders(order, tmp_path):
    assert reached(certificate("loopback", tmp_path, f"order={order}")) == CPU_LEVELS | {"graph", "quantized_kv"}


def test_the_plugin_frozen_with_contract_1_0(frozen, tmp_path):
    assert hashlib.sha256(FROZEN.read_bytes()).hexdigest() == FROZEN_SHA256, "a frozen wheel is never built again"
    found = certificate("template", tmp_path, path=frozen)
    assert (found.distribution, found.version, found.api) == ("pagedkv-template", "1.0.0", (1, 0))
    assert reached(found) == {"core", "copy", "engine"}
