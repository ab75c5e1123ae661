"""Progress bars on stderr, shown only to a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pagedkv.engine.outputs import RequestOutput


def _bar(*columns: TextColumn, shown: bool) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # else what is printed meanwhile would land on stderr with the bar
        disable=not (shown and console.is_terminal),
    )


@contextmanager
def loading_bar() -> Iterator[Callable[..., None]]:
    """A callback (what is done, how much there is in all, what=a name unless it is weights) that moves a bar."""
    with _bar(shown=True) as bar:
        task = bar.add_task("", total=None)

        def move(done: int, total: int, what: str = "Loading weights") -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield move


@contextmanager
def counting_bar(description: str, total: int) -> Iterator[Callable[[], None]]:
    """A callback that moves a bar of `total` equal parts by one."""
    with _bar(shown=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda: bar.advance(task)


class GenerationBar:
    """Counts finished prompts, and tokens: generated ones, and those of prompts that are scored."""

    def __init__(self, prompts: int, description: str = "Generating", *, enabled: bool) -> None:
        self._bar = _bar(TextColumn("{task.fields[speed]}"), shown=enabled)
        self._task = self._bar.add_task(description, total=prompts, speed="")
        self._tokens = 0

    def __enter__(self) -> GenerationBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, output: RequestOutput) -> None:
        """Take in one output of the engine."""
        if not output.finished:
            return
        self._tokens += sum(len(answer.token_ids) for answer in output.outputs)
        self._tokens += 0 if output.prompt_logprobs is None else len(output.prompt_token_ids)
        elapsed = self._bar.tasks[0].elapsed or 0.0
        speed = f"{self._tokens / elapsed:.1f} tokens/s" if elapsed > 0 else ""
        self._bar.update(self._task, advance=1, speed=speed)
