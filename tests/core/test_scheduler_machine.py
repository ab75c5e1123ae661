"""The core under random histories, against a dict model of what every slot holds (U11, U12, U13, U23, U25, U35, U38).

With host memory, copies land when the machine likes, and read their source at the first or at the last moment.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from pagedkv.api.errors import RequestTooLong
from pagedkv.core.request import Reason, Request, State
from tests.helpers.core_rig import VOCAB, Rig, solo

TEXT = (0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 0, 1)
PROMPTS = st.builds(
    lambda n, tail: [*TEXT[:n], *tail], st.integers(1, len(TEXT)), st.sampled_from([(), (), (2,), (3, 3)])
)


WANTED = (
    lambda length: range(0),
    lambda length: range(0),
    lambda length: range(length - 1),
    lambda length: range(length),
    lambda length: range(length - 1, length),
    lambda length: range(1),
)
"""Positions whose logits a request wants: none, those that score a prompt, all, the last, the first."""
LISTS = ("waiting", "swapped", "loading", "running")


class CoreMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(
        block_size=st.sampled_from([1, 3, 4, 16]),
        tokens=st.integers(12, 60),
        max_num_seqs=st.integers(1, 6),
        extra=st.integers(0, 20),
        chunked=st.booleans(),
        caching=st.booleans(),
        max_overtakes=st.integers(0, 3),
        max_scored=st.integers(1, 9),
        host=st.fixed_dictionaries(
            {
                "host_blocks": st.sampled_from([None, 0, 1, 2, 7, 50]),
                "host_caching": st.booleans(),
                "host_pool": st.sampled_from([1, 3, 50]),
                "mode": st.sampled_from(["swap", "swap", "recompute"]),
                "max_preemptions": st.integers(1, 4),
            }
        ),
    )
    def build(self, block_size, tokens, max_num_seqs, extra, chunked, caching, max_overtakes, max_scored, host):
        self.rig = Rig(
            **host,
            block_size=block_size,
            num_blocks=2 + tokens // block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra,
            max_model_len=40,
            chunked_prefill=chunked,
            prefix_caching=caching,
            max_overtakes=max_overtakes,
            max_scored=max_scored,
        )
        self.expected: dict[int, tuple[Request, list[int]]] = {}
        self.scored: list[tuple[Request, range]] = []
        self.several: list[tuple[Request, list[list[int]]]] = []

    @rule(
        target=requests,
        prompt=PROMPTS,
        max_tokens=st.sampled_from([0, 1, 2, 3, 5, 9, 16]),
        ask=st.sampled_from(WANTED),
        samples=st.sampled_from([1, 1, 2, 3]),
        end=st.sampled_from([(), (3,), (0, 4)]),
        priority=st.integers(0, 2),
        salt=st.sampled_from([b"", b"a"]),
    )
    def add(self, prompt, max_tokens, ask, samples, end, priority, salt):
        before = len(self.rig.scheduler.waiting)
        try:
            wanted = ask(len(prompt))
            request = self.rig.add(prompt, max_tokens, end_ids=end, priority=priority, salt=salt, wanted=wanted)
        except RequestTooLong as error:
            assert len(self.rig.scheduler.waiting) == before
            assert error.needed > error.available
            return multiple()
        self.expected[request.id] = (request, solo(prompt, max_tokens, end, salt))
        if wanted:
            self.scored.append((request, wanted))
        if samples > 1 and max_tokens:
            self.rig.samples[request.id] = samples
            self.several.append((request, [solo(prompt, max_tokens, end, salt, i) for i in range(1, samples)]))
        return request

    @rule(target=requests, parent=requests)
    def fork(self, parent):
        if parent.state is State.FINISHED:
            return multiple()
        child = self.rig.scheduler.fork(parent)
        self.rig.numbers[child.id] = self.rig.numbers.get(parent.id, 0)
        self.expected[child.id] = (child, self.expected[parent.id][1])
        return child

    @rule(request=requests)
    def abort(self, request):
        was_open = request.state is not State.FINISHED
        assert self.rig.scheduler.abort(request) == was_open

    @rule(count=st.integers(1, 8), land=st.booleans())
    def step(self, count, land):
        for _ in range(count):
            self.rig.step(land)

    @rule(data=st.data())
    def land_one(self, data):
        if self.rig.moving:
            self.rig.land(data.draw(st.sampled_from(list(self.rig.moving))))

    @rule(request=requests)
    def abort_while_a_step_is_computed(self, request):
        step = self.rig.schedule(land=False)
        if step is not None:
            self.rig.compute(step, between=lambda: self.rig.scheduler.abort(request))

    @rule()
    def reset_cache(self):
        self.rig.scheduler.reset_prefix_cache()
        assert self.rig.scheduler.pool.num_cached == self.rig.scheduler.tiers.host.num_cached == 0

    @rule()
    def interrupt_a_step(self):
        self.rig.schedule(land=False)
        self.rig.scheduler.restart()

    @rule()
    def change_weights(self):
        """Whatever was stored is worthless from now on: nobody reads it."""
        self.rig.scheduler.flush()
        self.rig.memory.clear()
        self.rig.host.clear()

    @invariant()
    def sound(self):
        if not hasattr(self, "rig"):
            return
        scheduler = self.rig.scheduler
        scheduler.check()
        pool = scheduler.pool
        assert pool.available + pool.num_used == self.rig.config.num_blocks - 1
        assert 0 <= pool.num_cached <= pool.available
        host = scheduler.tiers.host
        assert host.available + host.num_used == host.num_blocks - 1
        assert 0 <= host.num_cached <= host.available
        with_rows = len(scheduler.running) + len(scheduler.loading)
        assert with_rows + scheduler.rows.num_free == self.rig.config.max_num_seqs
        for request, _ in self.expected.values():
            listed = [
                name for name in ("waiting", "swapped", "loading", "running") if request in getattr(scheduler, name)
            ]
            assert listed == ([] if request.state is State.FINISHED else [request.state.value])
            assert request.num_preemptions <= scheduler.config.max_preemptions
            assert bool(request.saved) <= (request.state in (State.SWAPPED, State.LOADING))

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        self.rig.drain()
        for request, expected in self.expected.values():
            assert request.state is State.FINISHED
            if request.reason is Reason.ABORT:
                assert request.output_ids == expected[: len(request.output_ids)]
            else:
                assert request.output_ids == expected
                stopped = expected[-1:] and expected[-1] in request.end_ids
                assert request.reason is (Reason.STOP if stopped else Reason.LENGTH)
        for request, whole in self.scored:
            given = self.rig.scored.get(request.id, [])
            assert given == list(whole[: len(given)] if request.reason is Reason.ABORT else whole), "each once"
        for request, expected in self.several:
            children = self.rig.forks.get(request.id, [])
            assert [child.output_ids for child in children] == expected[: len(children)]
            assert len(children) == len(expected) or request.reason is Reason.ABORT


TestCoreMachine = pytest.mark.filterwarnings("ignore")(CoreMachine.TestCase)
TestCoreMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
assert VOCAB == 5, "end ids above are drawn from the rig's vocabulary"
