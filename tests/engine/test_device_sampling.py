"""A backend with its own greedy and sample, end to end: the same answers as without them, and ids alone on the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

from pagedkv import LLM, RequestOutput, SamplingParams
from pagedkv.conformance.loopback.backend import LoopbackBackend
from pagedkv.engine.setup import _device_ops
from pagedkv.ops import REFERENCE
from tests.helpers.engine_rig import engine, greedy, seeded, some_prompts, token_ids, transformers_greedy
from tests.helpers.plain import OpsOnlyBackend

LOOPBACK: dict[str, Any] = {"backend": "loopback", "backend_options": {}}
PROMPTS = some_prompts([9, 3, 14, 6, 5, 7])
EVERYONE = [
    greedy(8),
    seeded(5, 8, temperature=1.5),
    seeded(7, 8, top_k=20, top_p=0.9, temperature=2.0),
    seeded(7, 8, min_p=0.05, temperature=1.5),
    greedy(8, repetition_penalty=1.8, logit_bias={65: 4}),
    seeded(9, 8, presence_penalty=1.0, min_tokens=3),
]
_op, _to_host = LoopbackBackend.op, LoopbackBackend.to_host


@contextmanager
def loopback(*, ops: bool = True, **settings: Any) -> Iterator[LLM]:
    """An engine over loopback, with or without its ops of sampling."""

    def linear_only(self: Any, name: str, spec: Any) -> Any:
        return _op(self, name, spec) if name == "linear" else None

    with mock.patch.object(LoopbackBackend, "op", _op if ops else linear_only), engine(**LOOPBACK | settings) as llm:
        assert (llm.engine.parts.device_ops is not None) == ops
        yield llm


def answered(prompts: list[list[int]], params: list[SamplingParams], **settings: Any) -> list[RequestOutput]:
    with loopback(**settings) as llm:
        outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
        return outputs


def test_what_the_backend_lacks_of_the_two() -> None:
    """Nothing at all keeps the sampler's own way; the missing greedy is its reference, which sorts nothing.

    What there is has been called once before the first request.
    """
    own = mock.Mock()
    assert _device_ops(OpsOnlyBackend(), 50) is None
    one, other = (_device_ops(OpsOnlyBackend({name: own}), 50) for name in ("sample", "greedy"))
    assert one is not None and (one.greedy, one.sample) == (REFERENCE["greedy"], own)
    assert other is not None and (other.greedy, other.sample) == (own, None)
    assert [tuple(call.args[0].shape) for call in own.call_args_list] == [(1, 50), (1, 50)]


def test_all_kinds_in_one_batch_answer_as_without_the_ops() -> None:
    with_ops, without = (token_ids(answered(PROMPTS, EVERYONE, ops=ops)) for ops in (True, False))
    assert with_ops == without
    assert with_ops[0] == transformers_greedy(PROMPTS[0])


def test_a_step_brings_ids_to_the_host_and_nothing_else() -> None:
    """Greedy rows, or rows that temperature, top-k and top-p describe: one array of int32, one number a row."""
    for params in ([greedy(6)] * 3, [greedy(6), *EVERYONE[1:3]]):
        with (
            mock.patch.object(LoopbackBackend, "to_host", autospec=True, side_effect=_to_host) as copy,
            loopback() as llm,
        ):
            copy.reset_mock()
            llm.generate(PROMPTS[:3], params, use_tqdm=False)
            shapes = [(str(call.args[1].dtype), tuple(call.args[1].shape)) for call in copy.call_args_list]
            assert len(shapes) == llm.engine.stats.steps
            assert set(shapes) <= {("torch.int32", (rows,)) for rows in (1, 2, 3)}


@pytest.mark.parametrize("caching", [True, False])
def test_u23_u54_chunks_company_and_preemption_do_not_change_a_seeded_answer(caching: bool) -> None:
    """A request that was preempted goes on with its own stream of numbers, in another row."""
    params = seeded(7, 12, top_k=40, top_p=0.95, temperature=1.4)
    (alone,) = token_ids(answered(PROMPTS[:1], [params]))
    crowd = [params, seeded(8, 12), greedy(12), params]
    settings = {"num_blocks": 13, "block_size": 3, "max_model_len": 27, "max_num_batched_tokens": 7}
    with loopback(enable_prefix_caching=caching, max_num_seqs=4, **settings) as llm:
        outputs = llm.generate([PROMPTS[0], PROMPTS[1], PROMPTS[2], PROMPTS[0]], crowd, use_tqdm=False)
        assert llm.engine.scheduler.num_preemptions > 0
    assert token_ids(outputs)[0] == token_ids(outputs)[3] == alone


def test_u57_samples_of_one_prompt_are_their_own_streams_and_repeat() -> None:
    params = seeded(3, 8, n=4, temperature=2.0)
    runs = []
    for ops in (True, True, False):
        (output,) = answered(PROMPTS[:1], [params], ops=ops)
        runs.append([completion.token_ids for completion in output.outputs])
    assert len({tuple(ids) for ids in runs[0]}) == 4
    assert runs[0] == runs[1] == runs[2]


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    """Asked for beside ids that were drawn on the device; bias and temperature leave them alone."""
    params = [greedy(5, logprobs=3), seeded(4, 5, temperature=3.0, top_k=50, logprobs=2, logit_bias={70: 9})]
    with_ops, without = (answered(PROMPTS[:2], params, ops=ops) for ops in (True, False))
    for mine, theirs in zip(with_ops, without, strict=True):
        (a,), (b,) = mine.outputs, theirs.outputs
        assert a.token_ids == b.token_ids and len(a.logprobs or []) == 5
        assert a.logprobs == b.logprobs
        for token, found in zip(a.token_ids, a.logprobs or [], strict=True):
            assert token in found and all(np.isfinite(one.logprob) for one in found.values())


def test_a_seed_draws_the_same_on_a_backend_without_the_ops() -> None:
    with engine() as cpu:
        assert cpu.engine.parts.device_ops is None
        there = token_ids(cpu.generate(PROMPTS, EVERYONE, use_tqdm=False))
    assert token_ids(answered(PROMPTS, EVERYONE)) == there
