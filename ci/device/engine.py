"""The engine on one backend beside transformers' `generate`, on random weights of a model's shape: figures as JSON.

python ci/device/engine.py ci/device/llama-3.2-1b.json --backend cuda --output engine.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedkv import LLM, SamplingParams

PROMPT, ANSWER = 128, 128
ROUNDS = 2


def prompts(vocab_size: int, batch: int, run: int) -> list[list[int]]:
    """Random ids [batch, PROMPT], other ones in every run."""
    ids: list[list[int]] = np.random.default_rng([run, batch]).integers(0, vocab_size, (batch, PROMPT)).tolist()
    return ids


def speed(generate: Callable[[list[list[int]]], int], vocab_size: int, batch: int) -> float:
    """Output tokens a second, prefill included: the best of some rounds after a warm-up."""
    generate(prompts(vocab_size, batch, 0))
    speeds = []
    for run in range(1, ROUNDS + 1):
        given = prompts(vocab_size, batch, run)
        began = time.perf_counter()
        speeds.append(generate(given) / (time.perf_counter() - began))
    return max(speeds)


def engine(folder: Path, backend: str, dtype: str, sizes: list[int]) -> dict[int, float]:
    """Batch size -> tokens a second of pagedkv."""
    llm = LLM(
        folder,
        backend=backend,
        dtype=dtype,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=PROMPT + ANSWER,
        max_num_seqs=max(sizes),
    )
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)

    def generate(given: list[list[int]]) -> int:
        done = llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)
        return sum(len(one.outputs[0].token_ids) for one in done)

    try:
        vocab_size = llm.engine.parts.vocab_size
        return {batch: speed(generate, vocab_size, batch) for batch in sizes}
    finally:
        llm.close()


def peer(folder: Path, device: str, dtype: str, sizes: list[int]) -> dict[int, float]:
    """Batch size -> tokens a second of transformers on the same shape."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()

    def generate(given: list[list[int]]) -> int:
        ids = torch.tensor(given, device=device)
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, pad_token_id=0)
        return int((out.shape[1] - ids.shape[1]) * out.shape[0])

    return {batch: speed(generate, config.vocab_size, batch) for batch in sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, help="a config.json")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-sizes", default="1,8,32")
    parser.add_argument("--peer-device", default="cuda:0")
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    sizes = [int(part) for part in given.batch_sizes.split(",")]
    said: dict[str, Any] = {"shape": given.shape.name, "dtype": given.dtype, "prompt": PROMPT, "answer": ANSWER}
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(given.shape, Path(folder) / "config.json")
        for name, run in (
            ("pagedkv", lambda: engine(Path(folder), given.backend, given.dtype, sizes)),
            ("transformers", lambda: peer(Path(folder), given.peer_device, given.dtype, sizes)),
        ):
            said[name] = run()
            print(name, said[name], flush=True)
            given.output.write_text(json.dumps(said, indent=2) + "\n")


if __name__ == "__main__":
    main()
