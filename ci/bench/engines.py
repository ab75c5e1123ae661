"""One engine in a process of its own: reads jobs as JSON lines, answers each with a JSON line.

    python ci/bench/engines.py ENGINE '{"model": ..., "threads": ..., "largest": ..., "work": {...}}'

The first answer describes the engine. A job is {"batch": B, "run": n}; run 0 is a warm-up of a few tokens.
Standard output carries answers only; whatever a library prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from pagedkv.cli.standard_work import Bench, Measured, Work

WARM_UP_TOKENS = 4


class Engine(Protocol):
    """What the comparison needs of an engine."""

    def facts(self) -> dict[str, Any]:
        """Dtype, versions and the like."""

    def run(self, batch: int, number: int) -> dict[str, Any]:
        """{"seconds", "tokens" [batch, output_len], ...} of one run."""


class PagedKV:
    """pagedkv through its own engine, as `pagedkv bench` measures it."""

    def __init__(self, model: str, dtype: str, threads: int, largest: int, work: Work) -> None:
        # Only the reference backend is compared here; the option is its own.
        settings = {"dtype": dtype, "backend": "cpu", "backend_options": {"threads": threads}}
        self._bench = Bench(model, work, largest, settings)

    def facts(self) -> dict[str, Any]:
        """What was chosen."""
        from pagedkv.cli.machine import engine_facts

        return engine_facts(self._bench.parts)

    def run(self, batch: int, number: int) -> dict[str, Any]:
        """One run; the engine stays."""
        if number == 0:
            self._bench.warm_up(batch)
            return {}
        return _as_answer(self._bench.run(batch, number))


def _as_answer(measured: Measured) -> dict[str, Any]:
    return {**measured.figures(), "tokens": measured.tokens}


class Transformers:
    """transformers' `generate`: one static batch, its default cache, no padding since all prompts are equally long."""

    def __init__(self, model: str, dtype: str, threads: int, work: Work) -> None:
        import torch

        torch.set_num_threads(threads)
        self._model = _load_peer(model, getattr(torch, dtype)).eval()
        self._model.generation_config.eos_token_id = None  # an end token is a token like any other, as with ignore_eos
        self._work = work
        self._threads = threads

    def facts(self) -> dict[str, Any]:
        """Versions, dtype and attention."""
        import transformers

        return {
            "transformers": transformers.__version__,
            "dtype": str(self._model.dtype),
            "attention": self._model.config._attn_implementation,
            "threads": self._threads,
        }

    def run(self, batch: int, number: int) -> dict[str, Any]:
        """One run."""
        import torch

        prompts = torch.tensor(self._work.prompts(self._model.config.vocab_size, batch, number))
        count = self._work.output_len if number else min(WARM_UP_TOKENS, self._work.output_len)
        began = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - began
        tokens = output[:, prompts.shape[1] :].tolist()
        generated = sum(len(row) for row in tokens)
        return {
            "seconds": seconds,
            "output_tokens": generated,
            "tokens_per_second": generated / seconds,
            "tokens": tokens,
        }


def _load_peer(model: str, dtype: Any) -> Any:
    """The model in transformers. A GGUF file is dequantized by pagedkv's reader, so that the weights are the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from pagedkv.models.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model)
    path = Path(checkpoint.path)
    if checkpoint.format != "gguf":
        checkpoint.close()
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    peer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path.parent, gguf_file=path.name), dtype=dtype)
    weights = {name: checkpoint.tensor(name, dtype) for name in checkpoint.names()}
    checkpoint.close()
    missing, unexpected = peer.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if peer.config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise SystemExit(f"{path} does not fit transformers' model: missing {missing}, unexpected {unexpected}")
    peer.tie_weights()
    return peer


def make(name: str, model: str, threads: int, largest: int, work: Work) -> Engine:
    """The engine called "pagedkv" or "transformers", with its dtype behind a colon."""
    kind, _, dtype = name.partition(":")
    if kind == "pagedkv":
        return PagedKV(model, dtype or "float32", threads, largest, work)
    if kind == "transformers":
        return Transformers(model, dtype or "float32", threads, work)
    raise SystemExit(f"{name!r} is no engine; use pagedkv or transformers, with :float32 or :bfloat16 behind")


def serve(engine: Engine, loaded: float, jobs: Iterable[str], answers: Any) -> None:
    """Answer jobs until there are no more."""
    print(json.dumps({"load_seconds": loaded, **engine.facts()}), file=answers, flush=True)
    for line in jobs:
        job = json.loads(line)
        print(json.dumps(engine.run(job["batch"], job["run"])), file=answers, flush=True)


def main() -> None:
    """Entry point of the child process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    began, given = time.perf_counter(), json.loads(sys.argv[2])
    engine = make(sys.argv[1], given["model"], given["threads"], given["largest"], Work(**given["work"]))
    serve(engine, time.perf_counter() - began, sys.stdin, answers)


if __name__ == "__main__":
    main()
