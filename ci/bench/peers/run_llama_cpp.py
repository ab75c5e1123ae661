"""llama.cpp through llama-cpp-python's low-level interface: one context, all sequences in each batch, greedy."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import llama_cpp
import numpy as np
from protocol import Clock, Run, serve, timed


def load(given: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """Model and context; keys and values in its default type."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(given["model"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp does not load {given['model']}")
    context = _context(model, given)
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def generate(prompts: Sequence[Sequence[int]], count: int, clock: Clock) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch = llama_cpp.llama_batch_init(sum(map(len, prompts)), 0, 1)
        try:
            return _generate(context, batch, vocabulary, prompts, count, clock)
        finally:
            llama_cpp.llama_batch_free(batch)

    facts = {"version": llama_cpp.__version__, "dtype": "as in the file", "cache": "float16"}
    return timed(generate), {**facts, "system": llama_cpp.llama_print_system_info().decode().strip()}


def _context(model: Any, given: Mapping[str, Any]) -> Any:
    params = llama_cpp.llama_context_default_params()
    limits = given["limits"]
    params.n_ctx = params.n_batch = limits["tokens"] * limits["requests"]
    params.n_seq_max = limits["requests"]
    params.n_threads = params.n_threads_batch = given["threads"]
    params.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise SystemExit("llama.cpp made no context, as its log says")
    return context


def _generate(
    context: Any, batch: Any, vocabulary: int, prompts: Sequence[Sequence[int]], count: int, clock: Clock
) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    step = [(i, p, t, p == len(prompt) - 1) for i, prompt in enumerate(prompts) for p, t in enumerate(prompt)]
    for number in range(count):
        _fill(batch, step)
        if llama_cpp.llama_decode(context, batch) != 0:
            raise SystemExit("llama_decode failed, as its log says")
        ends = [at for at, (_, _, _, wanted) in enumerate(step) if wanted]
        for sequence, at in enumerate(ends):
            row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, at), (vocabulary,))
            tokens[sequence].append(int(row.argmax()))
        clock.tokens()
        step = [(i, len(prompt) + number, tokens[i][-1], True) for i, prompt in enumerate(prompts)]
    return tokens


def _fill(batch: Any, step: Sequence[tuple[int, int, int, bool]]) -> None:
    batch.n_tokens = len(step)
    for at, (sequence, position, token, wanted) in enumerate(step):
        batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
        batch.seq_id[at][0] = sequence
        batch.logits[at] = ctypes.c_int8(wanted)


if __name__ == "__main__":
    serve(load)
