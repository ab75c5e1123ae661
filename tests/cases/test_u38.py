"""U38: an abort is valid in every state, and does nothing to what is unknown or finished."""

from __future__ import annotations

from tests.helpers.engine_rig import drained, engine, greedy, solo, some_prompts


def test_u38_before_the_first_step_twice_after_the_end_and_at_random() -> None:
    prompts = some_prompts([5, 9])
    with engine() as llm:
        e = llm.engine
        queued = e.add_request(prompts[0], greedy(4), request_id="queued")
        output = e.abort_request(queued)
        assert output is not None and output.outputs[0].finish_reason == "abort"
        assert (output.request_id, output.outputs[0].token_ids, output.outputs[0].text) == ("queued", [], "")
        assert e.abort_request(queued) is None
        assert e.abort_request(123456) is None
        drained(llm)
        assert e.step() == []
        key = e.add_request(prompts[1], greedy(4))
        while e.has_unfinished_requests():
            done = dict(e.step())
        assert done[key].outputs[0].token_ids == solo(prompts[1], greedy(4))
        assert e.abort_request(key) is None


def test_u38_in_the_middle_of_a_prompt_while_decoding_and_when_preempted() -> None:
    long, other = some_prompts([20, 8])
    with engine(num_blocks=8, block_size=4, max_model_len=28, max_num_batched_tokens=8, max_num_seqs=4) as llm:
        e = llm.engine
        chunked = e.add_request(long, greedy(4))
        e.step()
        assert e.scheduler.pool.num_used == 5
        assert e.abort_request(chunked) is not None
        drained(llm)
        first, second = e.add_request(other, greedy(16)), e.add_request(list(reversed(other)), greedy(16))
        while not e.scheduler.num_preemptions:
            assert e.step() == []
        output = e.abort_request(second)
        assert output is not None and output.metrics.num_preemptions == 1
        known = output.outputs[0].token_ids
        assert known == solo(list(reversed(other)), greedy(16))[: len(known)] and known
        while e.has_unfinished_requests():
            done = dict(e.step())
        assert done[first].outputs[0].token_ids == solo(other, greedy(16))
