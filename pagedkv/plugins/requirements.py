"""What installed distributions require of each other, by their metadata; nothing is imported."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

_log = logging.getLogger("pagedkv.plugins")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmet:
    """A requirement that the installation does not meet; `installed` is None where the package is missing."""

    distribution: str
    package: str
    wanted: str
    installed: str | None

    def __str__(self) -> str:
        there = "it is not installed" if self.installed is None else f"{self.package} {self.installed} is installed"
        return f"{self.distribution} needs {self.package}{self.wanted}, {there}"


def installed_version(package: str) -> str | None:
    """The installed version; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfies(version: str, specifiers: str) -> bool:
    """Whether a version is in the range. Local and vendor builds ("2.10.0a0+nv25") count as the release they name."""
    try:
        release = Version(version).base_version
    except InvalidVersion:
        return False
    return SpecifierSet(specifiers).contains(release, prereleases=True)


def unmet(distribution: str) -> Iterator[Unmet]:
    """What the distribution requires in this environment, extras aside, and does not find."""
    for requirement in requirements(distribution):
        installed = installed_version(requirement.name)
        if installed is None or not satisfies(installed, str(requirement.specifier)):
            yield Unmet(
                distribution=distribution,
                package=requirement.name,
                wanted=str(requirement.specifier),
                installed=installed,
            )


def requirements(distribution: str) -> Iterator[Requirement]:
    """What the distribution requires in this environment, extras aside; nothing where it is not installed."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            _log.warning("a requirement of %s cannot be read and is left out: %s", distribution, error)
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement
