"""Sizes of launches. One axis only: x has room for 2^31 - 1 programs where y and z end at 65,535."""

from __future__ import annotations

from pagedkv.api.errors import UnsupportedError

MOST_PROGRAMS = 2**31 - 1


def one_axis(programs: int, kernel: str) -> tuple[int]:
    """The grid of `programs`. Raises `UnsupportedError` for more than a device starts at once."""
    if programs > MOST_PROGRAMS:
        raise UnsupportedError(
            [f"{kernel} over {programs} programs, a launch has {MOST_PROGRAMS} at most: split the batch"]
        )
    return (programs,)


def power_of_two(number: int, least: int = 16) -> int:
    """The smallest power of two that is not below `number` and `least`."""
    return max(least, 1 << (number - 1).bit_length())
