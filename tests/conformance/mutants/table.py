"""What a mutant is: a passing backend with one method replaced, and the law of the kit that must name the fault.

A mutant is written as the function that replaces the method, and gets the original first:

    @mutant("_sink", "sinks: exp(sink) of a query head is added", "test_attend.py::test_sinks")
    def sinks_left_out(original, self, layer, top):
        '''Sinks are not added to the denominator.'''
        return 0.0

Modules of mutants import no framework at their top: the descriptors that the kit loads import all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Wrong = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A passing backend, and the options that it is created with."""

    backend: str
    options: Mapping[str, Any]

    @property
    def control(self) -> str:
        """The name under which it is installed beside its mutants, unbroken."""
        words = [self.backend, *(f"{name}-{value}" for name, value in self.options.items())]
        return "unbroken-" + "-".join(words).replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One broken backend. `what` it does wrong; `law`: words of the law that must name it; `cases` that ask for it.

    `part` is whose method is replaced: "" the instance's, "descriptor" the descriptor's, else that of an attribute of
    the instance; "module": no method, the module of the descriptor is another one.
    """

    name: str
    what: str
    law: str
    cases: tuple[str, ...]
    base: Base
    part: str
    method: str
    wrong: Wrong

    def spoil(self, owner: Any) -> None:
        """Replace the method of `owner` by the wrong one."""
        cls = type(owner)
        owner.__class__ = type(cls.__name__, (cls,), {self.method: _replacing(getattr(cls, self.method), self.wrong)})


def _replacing(original: Any, wrong: Wrong) -> Wrong:
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrong(original, self, *args, **kwargs)

    return replaced


MUTANTS: list[Mutant] = []
"""Every mutant, in the order of definition, once the modules of mutants are imported."""


def mutant(
    method: str, law: str, *cases: str, base: str = "loopback", part: str = "", **options: Any
) -> Callable[[Wrong], Wrong]:
    """The decorated function replaces `method`; `options` are those that `base` is created with."""

    def add(wrong: Wrong) -> Wrong:
        MUTANTS.append(
            Mutant(
                name="mutant-" + wrong.__name__.replace("_", "-"),
                what=(wrong.__doc__ or "").strip(),
                law=law,
                cases=cases,
                base=Base(backend=base, options=options),
                part=part,
                method=method,
                wrong=wrong,
            )
        )
        return wrong

    return add
