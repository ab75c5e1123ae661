"""Records of a core that is one minor ahead: each has one field more, gated and at its default (law G2)."""

from __future__ import annotations

import dataclasses
from typing import Any

from pagedkv.api.records import Record, gated

FIELD, FEATURE = "field_of_tomorrow", "feature_of_tomorrow"


def grown_class(cls: type[Record]) -> type[Record]:
    """A subclass of the record with the field `field_of_tomorrow`, gated by `feature_of_tomorrow`."""
    fields = [(FIELD, "int | None", gated(FEATURE, None))]
    eq = cls.__eq__ is not object.__eq__  # records of arrays have none
    return dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), frozen=True, slots=True, kw_only=True, eq=eq)


def grown(record: Any, value: int | None = None) -> Any:
    """The record as such a core would send it, records inside it included."""
    if isinstance(record, tuple):
        return tuple(grown(item) for item in record)
    if not isinstance(record, Record):
        return record
    fields = {f.name: grown(getattr(record, f.name)) for f in dataclasses.fields(record)}
    return grown_class(type(record))(**fields, **{FIELD: value})
