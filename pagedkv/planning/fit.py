"""What fits: the engine's own budget, asked for one number of sequences and one length after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from pagedkv.api import Limits, PoolCost, PoolSpec
from pagedkv.api.errors import OutOfDeviceMemory
from pagedkv.engine.memory import MemoryPlan, MemoryRequest, read_memory
from pagedkv.engine.setup import Agreed, AnyCheckpoint, budget, workspace
from pagedkv.planning.target import Target

MOST_SEQUENCES = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One model with its settings on one target. Numbers of sequences and lengths are asked one by one."""

    target: Target
    checkpoint: AnyCheckpoint
    agreed: Agreed
    workspaces: dict[tuple[int, int, str], int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def limits(self) -> Limits:
        """What the settings ask for: rows are max_num_seqs, context is max_model_len."""
        return self.agreed.spec.limits

    def settings(self) -> MemoryPlan:
        """The engine's plan for the settings as they are. Raises `OutOfDeviceMemory`."""
        return self._budget(self.agreed.spec, self.agreed.request)

    def plan(self, sequences: int, length: int) -> MemoryPlan:
        """The engine's plan with these as max_num_seqs and max_model_len. Raises `OutOfDeviceMemory`."""
        return self._budget(*self.asked(sequences, length))

    def asked(self, sequences: int, length: int) -> tuple[PoolSpec, MemoryRequest]:
        """What the engine would ask for; a step has a token for each sequence at least."""
        tokens = max(self.limits.tokens, sequences)
        limits = dataclasses.replace(self.limits, rows=sequences, tokens=tokens, context=length)
        spec = dataclasses.replace(self.agreed.spec, limits=limits)
        request = dataclasses.replace(
            self.agreed.request,
            max_num_seqs=sequences,
            max_model_len=length,
            workspace=self._workspace(spec),
        )
        return spec, request

    def _workspace(self, spec: PoolSpec) -> int:
        """Computed once for each size of step: for a model of transformers it takes a dry run."""
        key = (spec.limits.tokens, spec.limits.rows, spec.dtype)
        if key not in self.workspaces:
            self.workspaces[key] = workspace(self.checkpoint, spec)
        return self.workspaces[key]

    def cost(self, spec: PoolSpec) -> PoolCost:
        """A pool's cost, by whoever knows it; `agreed` has asked through the checks already."""
        return read_memory(lambda: self.target.backend.pool_cost(spec), self.target.selected.name)

    def _budget(self, spec: PoolSpec, request: MemoryRequest) -> MemoryPlan:
        return budget(request, self.cost(spec), self.target.backend, self.target.selected.name)

    def needs(self, sequences: int, length: int) -> int:
        """Bytes that all of these sequences at full length take, with weights and workspace."""
        spec, request = self.asked(sequences, length)
        cost = self.cost(spec)
        return request.needed + cost.fixed + cost.per_block * request.useful_blocks

    def ceiling(self) -> int | None:
        """The most bytes that weights, workspace and cache may take together; None when nobody knows."""
        memory, request = self.target.memory(), self.agreed.request
        if memory.free is None:
            return None
        available = memory.free + (memory.reclaimable or 0)
        cache = self._cache(request)
        if cache is None:
            return available
        return min(available, request.needed + cache) if cache else self._left_open(request, available)

    def _cache(self, request: MemoryRequest) -> int | None:
        """Bytes that the cache may take, as far as a setting says or the backend does."""
        if request.kv_cache_bytes is not None:
            return request.kv_cache_bytes
        return None if request.num_blocks is not None else self.target.kv_budget(request.fraction, request.needed)

    def _left_open(self, request: MemoryRequest, available: int) -> int:
        """The most that may be taken before the cache: a budget that is used up says no more than that."""

        def leaves_some(reserved: int) -> bool:
            return bool(self.target.kv_budget(request.fraction, reserved))

        return largest(leaves_some, available, (self.target.kv_budget(request.fraction, 0) or 0) - 1)

    def holds(self, sequences: int, length: int) -> bool:
        """Whether that many sequences can all have that length at the same time."""
        spec, request = self.asked(sequences, length)
        try:
            return self._budget(spec, request).num_blocks >= request.useful_blocks
        except OutOfDeviceMemory:
            return False

    def longest(self, sequences: int) -> int:
        """The greatest length, up to the model's own limit, that this many sequences can have at once; 0 for none."""
        guess = self._room_blocks(sequences, 1) // sequences * self.agreed.choice.block_size
        return largest(lambda length: self.holds(sequences, length), self.checkpoint.config.max_position, guess)

    def most(self, length: int) -> int:
        """How many sequences of this length fit at once; 0 for none."""
        guess = self._room_blocks(1, length) // -(-length // self.agreed.choice.block_size)
        return largest(lambda sequences: self.holds(sequences, length), MOST_SEQUENCES, guess)

    def _room_blocks(self, sequences: int, length: int) -> int:
        """About how many blocks there is room for, where a search begins."""
        spec, request = self.asked(sequences, length)
        cost = self.cost(spec)
        return ((self.ceiling() or 0) - request.needed - cost.fixed) // cost.per_block


def largest(holds: Callable[[int], bool], limit: int, guess: int = 1) -> int:
    """The largest number from 1 to `limit` for which `holds`, which holds below whatever it holds for; 0 for none.

    Searched from `guess` outwards in growing steps, then between the last two that differ.
    """
    low, high, at, step = 0, limit + 1, max(1, min(guess, limit)), 1
    while high - low > 1:
        low, high = (at, high) if holds(at) else (low, at)
        above, below, step = low + step, high - step, 2 * step
        if high > limit and above < high:
            at = above
        else:
            at = below if low == 0 and below > 0 else (low + high) // 2
    return low
