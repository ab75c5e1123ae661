"""The conformance kit on the CUDA backend with the processor in a GPU's place: torch's operators, copies come late.

What a run on a device would add is named in the backend's own report: kernels, streams and graphs of the hardware. The
collectives' section is left out for its time: they are the contract's helper over NCCL, tested over Gloo elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.api import World, torch_backend
from pagedkv.api.errors import BackendUnavailable
from pagedkv.conformance import loading_child
from pagedkv.conformance.certificate import Certificate
from tests.backends.cuda.double import double
from tests.helpers.kits import Run, certificates, complaints

ROOT = Path(__file__).resolve().parents[3]
HAZARDS = "test_copy or test_graph or test_plans"
"""What a copy, an event or a recording at another moment could change."""


@pytest.fixture(scope="module")
def said() -> dict[int, Certificate]:
    """By the seed of moments and orders: all but collectives, then twice what these could change."""
    runs = {seed: Run(backend="cuda-double", options={"seed": seed}, select=HAZARDS) for seed in (1, 2)}
    runs[0] = Run(backend="cuda-double", options={"seed": 0}, select="not collectives")
    return dict(zip(runs, certificates(list(runs.values()), CUDA_VISIBLE_DEVICES=""), strict=True))


def test_the_kit_passes(said):
    assert complaints(said[0]) == []
    assert len(said[0].cases) > 280, "sections are missing"


@pytest.mark.parametrize("seed", [1, 2])
def test_copies_at_other_moments_and_in_another_order_change_nothing(said, seed):
    assert complaints(said[seed]) == [] and said[seed].options["seed"] == seed
    assert len(said[seed].cases) > 30, "sections are missing"


def test_the_real_descriptor_is_light():
    asked = json.dumps(
        {"target": "pagedkv_cuda.descriptor:CudaDescriptor", "path": [str(ROOT / "backends"), *sys.path]}
    )
    done = subprocess.run([sys.executable, loading_child.__file__, asked], capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert (answer["imported"], answer["frameworks"], answer["devices"], answer["raised"]) == ([], [], [], "")


def test_collectives_go_over_the_runtimes_own_library(monkeypatch):
    asked = []

    def refuse(name, world, group, *, timeout, note):
        asked.append((name, world, list(group)))
        raise BackendUnavailable("not here")

    monkeypatch.setattr(torch_backend, "communicator", refuse)
    world = World(rank=1, size=2, rendezvous="tcp://127.0.0.1:1")
    made = double(world=world)
    made._runtime.collectives = "nccl"
    with pytest.raises(BackendUnavailable):
        made.communicator([0, 1])
    assert asked == [("nccl", world, [0, 1])]
