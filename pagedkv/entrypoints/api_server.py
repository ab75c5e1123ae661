"""`python -m pagedkv.entrypoints.api_server --model MODEL ...`: what `pagedkv serve MODEL ...` does."""

from __future__ import annotations

import sys

from pagedkv.cli.main import pagedkv


def main(arguments: list[str] | None = None) -> None:
    """Run the command with these arguments, or those of the process."""
    pagedkv.main(
        args=["serve", *(sys.argv[1:] if arguments is None else arguments)],
        prog_name="python -m pagedkv.entrypoints.api_server",
    )


if __name__ == "__main__":
    main()
