"""Seeded work whose prompts begin alike: conversations, questions about documents, and agents that branch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

_TEXT = 1 << 32  # seeds of ids and of order never meet


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: `length` new tokens behind a context, or behind the prompt of `after` and its answer `branch`.

    `after` is a place in the work, an earlier one. `samples` answers are drawn.
    """

    length: int
    context: int = 0
    after: int | None = None
    branch: int = 0
    samples: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Requests in the order in which they come, `concurrency` of them open at once; all lengths in tokens.

    An ask comes when the one it follows has been answered. `about` says in words what it is.
    """

    scenario: str
    about: str
    contexts: tuple[int, ...]
    asks: tuple[Ask, ...]
    output_len: int
    concurrency: int
    seed: int

    @property
    def samples(self) -> int:
        """The most answers of one request."""
        return max(ask.samples for ask in self.asks)

    @property
    def tokens(self) -> int:
        """All tokens, what several prompts begin with counted once: what a cache would hold that forgot nothing."""
        return sum(self.contexts) + sum(ask.length + ask.samples * self.output_len for ask in self.asks)

    @property
    def prompt_lengths(self) -> list[int]:
        """Tokens of each prompt [asks]."""
        lengths: list[int] = []
        for ask in self.asks:
            before = self.contexts[ask.context] if ask.after is None else lengths[ask.after] + self.output_len
            lengths.append(before + ask.length)
        return lengths

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and its answer."""
        return max(self.prompt_lengths) + self.output_len

    def texts(self, vocab_size: int) -> tuple[list[list[int]], list[list[int]]]:
        """Random ids of the contexts, and of what each ask adds."""
        generator = np.random.default_rng([self.seed, _TEXT])

        def ids(length: int) -> list[int]:
            drawn: list[int] = generator.integers(0, vocab_size, length).tolist()
            return drawn

        return [ids(length) for length in self.contexts], [ids(ask.length) for ask in self.asks]


def work(scenario: str, sizes: Mapping[str, int], seed: int) -> Work:
    """The work of a scenario of `SIZES`."""
    about, contexts, asks = _MAKERS[scenario](sizes, np.random.default_rng(seed))
    return Work(
        scenario=scenario,
        about=about,
        contexts=contexts,
        asks=tuple(asks),
        output_len=sizes["output_len"],
        concurrency=sizes["concurrency"],
        seed=seed,
    )


_Made = tuple[str, tuple[int, ...], list[Ask]]


def _chat(sizes: Mapping[str, int], generator: np.random.Generator) -> _Made:
    """Conversations over one system prompt; in each round every user has one turn, in another order."""
    users, turns, length = sizes["users"], sizes["turns"], sizes["input_len"]
    asks: list[Ask] = []
    last: dict[int, int] = {}
    for _ in range(turns):
        for user in generator.permutation(users).tolist():
            asks.append(Ask(length=length, after=last.get(user)))
            last[user] = len(asks) - 1
    return f"{users} users, {turns} turns each, one system prompt", (sizes["context_len"],), asks


def _documents(sizes: Mapping[str, int], generator: np.random.Generator) -> _Made:
    """Every document is asked about equally often, in mixed order."""
    documents, questions = sizes["documents"], sizes["questions"]
    order = generator.permutation(np.repeat(np.arange(documents), questions)).tolist()
    asks = [Ask(length=sizes["input_len"], context=document) for document in order]
    return f"{documents} documents, {questions} questions about each", (sizes["context_len"],) * documents, asks


def _agents(sizes: Mapping[str, int], generator: np.random.Generator) -> _Made:
    """One task, whose answers each branch again; after each level, some go back to the one before it."""
    branches, depth, length = sizes["branches"], sizes["depth"], sizes["input_len"]
    asks = [Ask(length=length, samples=branches)]
    level = [0]
    for deeper in range(1, depth + 1):
        samples = branches if deeper < depth else 1
        grown = [(parent, branch) for parent in level for branch in range(branches)]
        order = generator.permutation(len(grown)).tolist()
        level = list(range(len(asks), len(asks) + len(grown)))
        asks += [_follow(grown[at], length, samples) for at in order]
        back = generator.permutation(len(grown))[: -(-len(grown) // 2)].tolist()
        asks += [_follow(grown[at], length, 1) for at in back]
    about = f"one task, {branches} branches each time, {depth} deep, and back to where they began"
    return about, (sizes["context_len"],), asks


def _follow(place: tuple[int, int], length: int, samples: int) -> Ask:
    return Ask(length=length, after=place[0], branch=place[1], samples=samples)


_MAKERS: Mapping[str, Callable[[Mapping[str, int], np.random.Generator], _Made]] = {
    "chat": _chat,
    "documents": _documents,
    "agents": _agents,
}
