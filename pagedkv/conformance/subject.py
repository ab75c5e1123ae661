"""The backend under test: found, loaded and created the way an engine does it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from pagedkv import plugins
from pagedkv.api import AttentionBackend, Capabilities, Descriptor, DeviceInfo, World


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

    def create(self, world: World | None = None) -> AttentionBackend:
        """A new, independent instance; the caller closes it."""
        return plugins.create(self.selected, self.options, world)

    @functools.cached_property
    def backend(self) -> AttentionBackend:
        """The instance of all cases that do not need one of their own."""
        return self.create()

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """What that instance declares: which cases apply follows from this record alone."""
        return self.backend.capabilities()

    def close(self) -> None:
        """Close the shared instance, if there was one."""
        if "backend" in self.__dict__:
            self.backend.close()
