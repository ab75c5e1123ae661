"""Plugins that are wrong, each in one way of its own, as distributions that pip installs.

`BROKEN`, `VERSIONS` and `METHODS` say for each what the listing shows and what an explicit choice raises. `site()` has
them all installed, or some; `PROBED` are those for which a probe's child process makes a difference (each costs 0.4 s).
"""

from __future__ import annotations

import atexit
import functools
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.plugins import Status, probe_all
from tests.helpers.plugin_dists import descriptor, source_tree, wheel
from tests.helpers.wheels import build_wheel, install_wheels

MEGABYTE = "print('x' * 1_000_000, flush=True); sys.stderr.write('y' * 1_000_000)"
PATCH = "import pagedkv.api; pagedkv.api.needs = lambda record: ()"
REPLACED = "replaced pagedkv.api.needs, which belongs to pagedkv"
DEVICE = "DeviceInfo(index=0, kind='card', score=95)"
ANY_MODEL = """
    CAPABILITIES = Capabilities(
        dtypes=("fp32",), kv_dtypes=("fp32",), block_sizes=((1, 1, 1024),), head_dims=((1, 1, 1024),),
        preferred_block_size=16, features=frozenset({"mixed_batch", "prefix_hit", "nan_safe"}),
    )
"""


@dataclass(frozen=True)
class Wrong:
    """`members` of `plugin_dists.descriptor`, or a whole `source`.

    status, said   of its row in the listing, `said` being part of a reason
    selecting      part of the error when it is chosen by name; None: it can be chosen
    creating       part of the error when it is created; None: it can be, or there is nothing to create
    """

    status: str
    said: str = ""
    selecting: str | None = None
    creating: str | None = None
    source: str | None = None
    members: Mapping[str, Any] | None = None

    def module(self, name: str) -> str:
        return self.source or descriptor(name, **{"score": 95, **(self.members or {})})


def failing(said: str, source: str | None = None, **members: Any) -> Wrong:
    """Refused by listing and choice alike, for one reason."""
    return Wrong("failed", said, said, source=source, members=members)


def created(said: str, **members: Any) -> Wrong:
    """Only its instance is wrong, so that listing and choice are fine; by name only, to stay out of anyone's way."""
    return Wrong("ok", creating=said, members={"score": 0, **members})


BROKEN: dict[str, Wrong] = {
    "import-missing": failing("raised ModuleNotFoundError: No module named 'vendor_sdk'", "import vendor_sdk"),
    "import-assert": failing("importing raised AssertionError: too old", "assert False, 'too old'"),
    "import-exit": failing("importing raised SystemExit: 3", "raise SystemExit(3)"),
    "import-silent-exit": failing("importing raised SystemExit", "import sys; sys.exit()"),
    "import-stop": failing("importing raised StopIteration: 1", "raise StopIteration(1)"),
    "import-odd": failing(
        "importing raised Odd: a Odd whose text raises RuntimeError",
        "class Odd(BaseException):\n    def __str__(self): raise RuntimeError\nraise Odd",
    ),
    "import-syntax": failing("importing raised SyntaxError", "def broken(:"),
    "import-signal": Wrong("failed", "signal SIGKILL", source="import os; os.kill(os.getpid(), 9)"),
    "import-interrupt": Wrong("failed", "its probe", source="raise KeyboardInterrupt"),
    "import-hangs": Wrong("timeout", "no answer to 'probe' within 2 s", source="import time; time.sleep(60)"),
    "import-noisy": Wrong("ok", members={"top": MEGABYTE, "score": 8}),
    "probe-noisy": Wrong(
        "ok", members={"probe": f"def probe(self): {MEGABYTE}; return (DeviceInfo(index=0, kind='k', score=7),)"}
    ),
    "probe-hangs": Wrong(
        "timeout",
        "no answer to 'probe' within 2 s",
        "probing raised TimeoutError: no answer within 0.2 s",
        members={"probe": "def probe(self): time.sleep(60)"},
    ),
    "probe-dies": Wrong("failed", "signal SIGSEGV", members={"probe": "def probe(self): os.kill(os.getpid(), 11)"}),
    "probe-exits": Wrong("failed", "exit code 7", members={"probe": "def probe(self): os._exit(7)"}),
    "probe-raises": failing("probing raised OSError: no driver", probe="def probe(self): raise OSError('no driver')"),
    "probe-none": failing("probe() returned None, must return a tuple of DeviceInfo", probe="def probe(self): pass"),
    "probe-list": failing("probe() returned [DeviceInfo(", probe=f"def probe(self): return [{DEVICE}]"),
    "probe-text": failing(
        "index is '0', must be a whole number from 0 on",
        probe="def probe(self): return (DeviceInfo(index='0', kind='k', score=9),)",
    ),
    "probe-twice": failing("two devices have one index: [0, 0]", probe=f"def probe(self): return ({DEVICE}, {DEVICE})"),
    "describe-dict": Wrong(
        "failed",
        "describe() returned {}, must return Capabilities",
        members={"describe": "def describe(self, device): return {}"},
    ),
    "describe-wrong": Wrong(
        "failed",
        "block_sizes is (16,), must be a tuple of frozensets of sizes or of (multiple_of, min, max)",
        members={"describe": "def describe(self, device): return dataclasses.replace(CAPABILITIES, block_sizes=(16,))"},
    ),
    "describe-raises": Wrong(
        "failed",
        "describing its device raised ZeroDivisionError",
        members={"describe": "def describe(self, device): 1 / 0"},
    ),
    "options-wrong": failing(
        "option 'level': default is '3', must be int or None",
        options="options = (Option(name='level', type=int, default='3', help='h'),)",
    ),
    "options-twice": failing(
        "two options answer to 'level'",
        options="options = tuple(Option(name=n, type=int, default=3, help='h', aliases=('level',)) for n in 'ab')",
    ),
    "name-differs": failing("name is 'other', must be the entry point's 'name-differs'", name="name = 'other'"),
    "patches-import": failing(f"importing {REPLACED}", top=PATCH),
    "patches-descriptor": failing(
        f"making the descriptor {REPLACED}", diagnose=f"def __init__(self):\n    {PATCH}\n    super().__init__()"
    ),
    "patches-probe": failing(f"probing {REPLACED}", probe=f"def probe(self):\n    {PATCH}\n    return ({DEVICE},)"),
    "patches-describe": Wrong(
        "failed",
        f"describing its device {REPLACED}",
        members={"describe": f"def describe(self, device):\n    {PATCH}\n    return CAPABILITIES"},
    ),
    "patches-create": created(
        f"creating the backend {REPLACED}",
        create=f"def create(self, device, options, world):\n    {PATCH}\n    return FakeBackend()",
    ),
    "create-none": created("create() returned None", create="def create(self, device, options, world): pass"),
    "create-raises": created(
        "creating the backend raised OSError: busy",
        create="def create(self, device, options, world): raise OSError('busy')",
    ),
    "create-exits": created(
        "creating the backend raised SystemExit: 0", create="def create(self, device, options, world): sys.exit(0)"
    ),
    "capabilities-wrong": created(
        "capabilities() returned wrong ones: preferred_block_size is 24, must be one of its block_sizes",
        create="def create(self, device, options, world): return FakeBackend()",
        backend={
            "capabilities": "def capabilities(self): return dataclasses.replace(CAPABILITIES, preferred_block_size=24)"
        },
    ),
    "cost-none": Wrong(
        "ok",
        members={
            "score": 0,
            "capabilities": ANY_MODEL,
            "backend": {"pool_cost": "def pool_cost(self, spec): return 4096"},
        },
    ),
    "cost-wrong": Wrong(
        "ok",
        members={
            "score": 0,
            "capabilities": ANY_MODEL,
            "backend": {"pool_cost": "def pool_cost(self, spec): return PoolCost(per_block=0, fixed=1.5)"},
        },
    ),
    "patches-pool": Wrong(
        "ok",
        members={
            "score": 0,
            "capabilities": ANY_MODEL,
            "backend": {
                "pool_cost": f"def pool_cost(self, spec):\n    {PATCH}\n    return PoolCost(per_block=1, fixed=0)"
            },
        },
    ),
}
"""Every way to be wrong but those below."""

VERSIONS: dict[str, Wrong] = {
    "v1-0": Wrong("ok", members={"api": "(1, 0)", "score": 0}),
    "v1-99-min-0": Wrong("ok", members={"api": "(1, 99)", "score": 0, "diagnose": "requires_api_minor = 0"}),
    "v1-99": failing("for contract 1.99 and needs at least 1.99; this pagedkv speaks contract 1.1", api="(1, 99)"),
    "v1-0-min-7": failing(
        "for contract 1.0 and needs at least 1.7; this pagedkv speaks contract 1.1", diagnose="requires_api_minor = 7"
    ),
    "v2-0": failing("for contract 2.0 and needs at least 2.0; this pagedkv speaks contract 1.1", api="(2, 0)"),
    "v2-0-min-0": failing(
        "for contract 2.0 and needs at least 2.0; this pagedkv speaks contract 1.1",
        api="(2, 0)",
        diagnose="requires_api_minor = 0",
    ),
    "v0-9": failing("for contract 0.9 and needs at least 0.9; this pagedkv speaks contract 1.1", api="(0, 9)"),
    "v99": failing("api is (99,), must be the contract's (major, minor); this pagedkv speaks 1.1", api="(99,)"),
    "v-none": failing("api is None, must be the contract's (major, minor); this pagedkv speaks 1.1", api=None),
    "v-text": failing("api is '1.0', must be the contract's (major, minor); this pagedkv speaks 1.1", api="'1.0'"),
    "v-true": failing("api is (True, 0), must be the contract's (major, minor)", api="(True, 0)"),
    "v-min-text": failing(
        "requires_api_minor is '0', must be a whole number from 0 on, or None", diagnose="requires_api_minor = '0'"
    ),
}
"""U78."""

METHODS: dict[str, Wrong] = {
    "no-descriptor": failing(
        "no_descriptor_dist:Fake is no subclass of pagedkv.api.Descriptor; name is None", "class Fake: pass"
    ),
    "no-probe": failing("method probe is missing", without=("probe",)),
    "no-create": failing("method create is missing", without=("create",)),
    "no-optional": Wrong("ok", members={"score": 0, "without": ("diagnose", "options")}),
    # Python's own words, which name the methods; they differ between its versions.
    "no-attend": created("abstract method", backend_without=("attend",)),
    "no-plan-no-copy": created("abstract methods", backend_without=("plan", "copy_blocks")),
    "capabilities-five": created(
        "capabilities() returned 5, must return Capabilities",
        backend={"capabilities": "def capabilities(self): return 5"},
    ),
    "one-more": Wrong(
        "ok",
        members={
            "score": 0,
            "_own": "def tune(self): return 1",
            "backend": {"refresh_table": "def refresh_table(self, rows): return rows"},
        },
    ),
}
"""U79."""

EVERYONE = BROKEN | VERSIONS | METHODS

FROM_SOURCE = ("import-missing",)
"""Those that go through `pip wheel`, from a source tree; the other wheel files are written here."""

PROBED = (
    "import-missing",
    "import-exit",
    "import-signal",
    "import-interrupt",
    "import-hangs",
    "import-noisy",
    "probe-noisy",
    "probe-hangs",
    "probe-dies",
    "probe-exits",
    "describe-wrong",
    "patches-import",
    "v2-0",
    "v1-99-min-0",
    "no-create",
    "one-more",
)
"""One of each kind, for what asks them all in their child processes."""


def distribution(name: str) -> str:
    return f"{name}-dist"


@functools.cache
def _home() -> Path:
    home = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


@functools.cache
def _wheel(name: str) -> Path:
    names: dict[str, Any] = {"name": name, "distribution": distribution(name), "version": "0.3"}
    source = EVERYONE[name].module(name)
    if name in FROM_SOURCE:
        return build_wheel(source_tree(_home() / "source" / name, source, **names), _home())
    return wheel(_home(), source, **names)


@functools.cache
def site(names: tuple[str, ...] = tuple(EVERYONE)) -> Path:
    """These, installed."""
    return install_wheels([_wheel(name) for name in names], Path(tempfile.mkdtemp(dir=_home())))


@functools.cache
def statuses() -> tuple[Status, ...]:
    """What the probes say of every backend there is, `PROBED` included; asked once."""
    sys.path.insert(0, str(site(PROBED)))
    try:
        return tuple(probe_all())
    finally:
        sys.path.remove(str(site(PROBED)))
