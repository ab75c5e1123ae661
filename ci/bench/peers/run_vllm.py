"""vLLM for CPU, compiled, in one process, on the folder in Hugging Face layout that the comparison writes for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from protocol import Clock, Run, cache_bytes, serve, timed

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def load(given: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """The engine with prefix caching off."""
    room = -(-cache_bytes(given, BYTES[given["dtype"]]) // 2**30)
    os.environ |= {
        # Its worker in a process of its own did not come up on a machine with two cores.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(room),
        "VLLM_NO_USAGE_STATS": "1",
    }
    import vllm  # reads the environment

    limits = given["limits"]
    engine = vllm.LLM(
        model=given["folder"],
        skip_tokenizer_init=True,
        dtype=given["dtype"],
        max_model_len=limits["tokens"],
        max_num_seqs=limits["requests"],
        max_num_batched_tokens=max(4096, limits["tokens"]),
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    facts = {"version": vllm.__version__, "dtype": given["dtype"], "cache": given["dtype"], "compiled": True}
    return timed(_Generate(engine.llm_engine, vllm.SamplingParams)), facts


class _Generate:
    """Steps the engine as its own `generate` does, and looks after each step who got a token."""

    def __init__(self, engine: Any, params: Any) -> None:
        self._engine = engine
        self._params = params
        self._number = 0

    def __call__(self, prompts: Sequence[Sequence[int]], count: int, clock: Clock) -> list[list[int]]:
        params = self._params(temperature=0, max_tokens=count, min_tokens=count, ignore_eos=True, detokenize=False)
        places = {str(self._number + place): place for place in range(len(prompts))}
        self._number += len(prompts)
        for name, prompt in zip(places, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        tokens: list[list[int]] = [[] for _ in prompts]
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                place = places[output.request_id]
                tokens[place] = list(output.outputs[0].token_ids)
                for _ in range(len(tokens[place]) - len(clock.stamps[place])):
                    clock.token(place)
        return tokens


if __name__ == "__main__":
    serve(load)
