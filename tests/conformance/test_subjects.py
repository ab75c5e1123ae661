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
from tests.helpers.kits import Run, certificates, complaints
from tests.helpers.wheels import install_wheel

ROOT = Path(__file__).resolve().parents[2]
FROZEN = ROOT / "tests" / "frozen" / "pagedkv_template-1.0.0-py3-none-any.whl"
FROZEN_SHA256 = "aace2d6f623bbcccaab725ea11750852291eee6e2b6b5a7cceba46aa40dc9bcc"

CPU_LEVELS = {"core", "copy", "canonical_kv", "lse", "collectives", "engine"}
OWN = {
    "native": Run(backend="cpu", options={"threads": 1, "kernels": "native"}),
    "torch": Run(backend="cpu", options={"threads": 1, "kernels": "torch"}),
    "late": Run(backend="loopback", options={"order": "late"}),
    "early": Run(backend="loopback", options={"order": "early"}),
}


@pytest.fixture(scope="module")
def own() -> dict[str, Certificate]:
    """What the whole kit says of our backends, by the name in `OWN`."""
    here = {name: run for name, run in OWN.items() if name != "native" or not native.why_missing()}
    return dict(zip(here, certificates(list(here.values())), strict=True))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory) -> Path:
    """A folder that holds the frozen plugin, installed by pip from its wheel."""
    return install_wheel(FROZEN, tmp_path_factory.mktemp("frozen") / "site")


def certificate(name: str, folder: Path, site: Path) -> Certificate:
    """What the whole kit says of a backend in `site`, run as its authors run it."""
    target = folder / f"{name}.json"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "pagedkv.conformance.plugin"]
    command += ["--pyargs", "pagedkv.conformance", "--backend", name, "--certificate", str(target), "-q", "--tb=short"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (site, ROOT)))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert target.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    found = Certificate.from_json(target.read_text("utf-8"))
    assert found.passed, done.stdout[-6000:]
    return found


def reached(found: Certificate) -> set[str]:
    return {level for level, verdict in found.levels().items() if verdict == "reached"}


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_the_cpu_backend_on_both_of_its_paths(kernels, own):
    if kernels == "native" and (reason := native.why_missing()):
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    assert own[kernels].passed, complaints(own[kernels])
    assert (own[kernels].backend, own[kernels].options["kernels"]) == ("cpu", kernels)
    assert reached(own[kernels]) == CPU_LEVELS


@pytest.mark.parametrize("order", ["late", "early"])
def test_loopback_in_both_extreme_orders(order, own):
    assert own[order].passed, complaints(own[order])
    assert (own[order].backend, own[order].options["order"]) == ("loopback", order)
    assert reached(own[order]) == CPU_LEVELS | {"graph", "quantized_kv"}


def test_the_plugin_frozen_with_contract_1_0(frozen, tmp_path):
    assert hashlib.sha256(FROZEN.read_bytes()).hexdigest() == FROZEN_SHA256, "a frozen wheel is never built again"
    found = certificate("template", tmp_path, frozen)
    assert (found.distribution, found.version, found.api) == ("pagedkv-template", "1.0.0", (1, 0))
    assert reached(found) == {"core", "copy", "engine"}
