"""The backend under test: found, loaded and created the way an engine does it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from pagedkv import plugins
from pagedkv.api import AttentionBackend, Capabilities, Descriptor, DeviceInfo, World
from pagedkv.checking import CheckedBackend


class Subject:
    """One installed backend, one of its devices, and the options it is created with.

    Raises what `plugins.select` raises: the kit tests nothing that an engine could not load.
    """

    def __init__(
        self, name: str, *, device: int | None = None, options: Mapping[str, Any] | tuple[str, ...] = ()
    ) -> None:
        self.selected = plugins.select(name, device=device)
        texts = options if isinstance(options, tuple) else ()
        given = options if isinstance(options, Mapping) else plugins.parse_options(self.descriptor, texts)
        self.options = plugins.check_options(self.descriptor, given)

    @property
    def name(self) -> str:
        """The entry point's name."""
        return self.selected.name

    @property
    def descriptor(self) -> Descriptor:
        """What the entry point names."""
        return self.selected.descriptor

    @property
    def device(self) -> DeviceInfo:
        """The device that instances are created on."""
        return self.selected.device

    @functools.cached_property
    def offered(self) -> Capabilities:
        """The most that an instance may declare."""
        return self.descriptor.describe(self.device)

    def create(self, world: World | None = None, *, checked: bool = True) -> AttentionBackend:
        """A new, independent instance; the caller closes it. Not `checked`: without the law checker in any case."""
        make = plugins.create if checked else plugins.make
        return make(self.selected, self.options, world)

    @functools.cached_property
    def backend(self) -> AttentionBackend:
        """The instance of all cases that do not need one of their own."""
        return self.create()

    @functools.cached_property
    def unchecked(self) -> AttentionBackend:
        """The shared instance of cases that break the caller's laws: only the backend itself may answer them."""
        return self.create(checked=False) if isinstance(self.backend, CheckedBackend) else self.backend

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """What that instance declares: which cases apply follows from this record alone."""
        return self.backend.capabilities()

    def close(self) -> None:
        """Close the shared instances, if there were any."""
        for name in ("unchecked", "backend"):
            if name in self.__dict__:
                getattr(self, name).close()
