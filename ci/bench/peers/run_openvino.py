"""OpenVINO GenAI: continuous batching over its paged cache, the same GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from protocol import Clock, Run, cache_bytes, serve, timed


def load(given: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """The pipeline with prefix caching off and a cache large enough for keys and values of two bytes."""
    settings = genai.SchedulerConfig()
    settings.max_num_batched_tokens = 4096
    settings.max_num_seqs = given["limits"]["requests"]
    settings.enable_prefix_caching = False
    settings.cache_size = -(-cache_bytes(given, 2) // 2**30)
    pipe = genai.ContinuousBatchingPipeline(
        given["model"], scheduler_config=settings, device="CPU", properties={"INFERENCE_NUM_THREADS": given["threads"]}
    )
    core = ov.Core()
    facts = {
        "version": genai.__version__,
        "dtype": core.get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name(),
        "cache": core.get_property("CPU", "KV_CACHE_PRECISION").get_type_name(),
    }
    return timed(_Generate(pipe)), facts


class _Generate:
    """Steps the pipeline as its own `generate` does, and looks after each step who got a token."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe
        self._number = 0

    def __call__(self, prompts: Sequence[Sequence[int]], count: int, clock: Clock) -> list[list[int]]:
        config = genai.GenerationConfig(
            max_new_tokens=count, min_new_tokens=count, ignore_eos=True, do_sample=False, apply_chat_template=False
        )
        handles = []
        for prompt in prompts:
            handles.append(self._pipe.add_request(self._number, ov.Tensor(np.array([prompt], np.int64)), config))
            self._number += 1
        tokens: list[list[int]] = [[] for _ in prompts]
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            for place, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        tokens[place] += map(int, output.generated_ids)
                        for _ in output.generated_ids:
                            clock.token(place)
        return tokens


if __name__ == "__main__":
    serve(load)
