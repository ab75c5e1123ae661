"""Third-party backends that compute, built from `plugins/template` by pip and installed side by side.

template    as it is
second      a copy under another name, from another distribution
tomorrow    the template as its author would write it against contract 1.99: records with fields that this core does
            not know, one more method, `requires_api_minor = 0`
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from tests.helpers.plugin_dists import source_tree
from tests.helpers.wheels import build_wheels, install_wheels

TEMPLATE = Path(__file__).resolve().parents[2] / "plugins" / "template"
NAMES = ("second", "template", "tomorrow")
DISTRIBUTIONS = {"second": "pagedkv-second", "template": "pagedkv-template", "tomorrow": "tomorrow-dist"}

TOMORROW = """
import dataclasses
from pagedkv.api import Capabilities, DeviceInfo, PoolCost
from pagedkv_template import TemplateDescriptor


class Fake(TemplateDescriptor):
    name = "tomorrow"
    api = (1, 99)
    requires_api_minor = 0

    def probe(self):
        return (DeviceInfo.of(index=0, kind="the card of tomorrow", score=0, numa_node=1),)

    def describe(self, device):
        own = super().describe(device)
        fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
        fields["features"] |= {"a_feature_of_tomorrow"}
        return Capabilities.of(**fields, tiers=frozenset({"disk"}))

    def create(self, device, options, world):
        backend = super().create(device, options, world)

        class Grown(type(backend)):
            def pool_cost(self, spec):
                cost = super().pool_cost(spec)
                return PoolCost.of(per_block=cost.per_block, fixed=cost.fixed, staging=0)

            def refresh_table(self, rows):
                raise RuntimeError("this core does not know it and never calls it")

        backend.__class__ = Grown
        return backend
"""


@functools.cache
def site() -> Path:
    """The three of them, installed."""
    home = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    tomorrow = source_tree(home / "tomorrow", TOMORROW, name="tomorrow", distribution="tomorrow-dist")
    wheels = build_wheels([TEMPLATE, renamed(home / "second", "second"), tomorrow], home / "wheels")
    return install_wheels(wheels, home / "site")


def renamed(folder: Path, name: str) -> Path:
    """The template as the guide tells to copy it: another name for backend, package and distribution."""
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    (folder / "pagedkv_template").rename(folder / f"pagedkv_{name}")
    for path in [folder / "pyproject.toml", *folder.rglob("*.py")]:
        text = path.read_text("utf-8").replace("pagedkv_template", f"pagedkv_{name}")
        text = text.replace("pagedkv-template", f"pagedkv-{name}").replace('"template"', f'"{name}"')
        path.write_text(text.replace("template =", f"{name} ="), "utf-8")
    return folder
