"""The engine on one backend beside transformers' `generate`, on random weights of a model's shape: figures as JSON.

python ci/device/engine.py ci/device/llama-3.2-1b.json --backend cuda --output engine.json

First whether both give the same tokens: a small model of the same kind in float32, saved by transformers, read by both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
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


def engine(folder: Path, sizes: list[int], **settings: Any) -> dict[int, float]:
    """Batch size -> tokens a second of pagedkv."""
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=PROMPT + ANSWER,
        max_num_seqs=max(sizes),
        **settings,
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
        return sum(map(len, generated(model, given, device, ANSWER)))

    return {batch: speed(generate, config.vocab_size, batch) for batch in sizes}


def generated(model: Any, given: list[list[int]], device: str, count: int) -> list[list[int]]:
    """So many greedy tokens of transformers after each prompt, all prompts of one length."""
    ids = torch.tensor(given, device=device)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    answers: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return answers


SMALL = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
"""The model of the comparison: in float32, so that both round alike and random weights leave no ties."""


def agreement(shape: Path, device: str, **settings: Any) -> dict[str, Any]:
    """How many greedy tokens are the same after each prompt, until the first that is not."""
    import transformers

    given, count = prompts(SMALL["vocab_size"], 4, 7), 48
    with tempfile.TemporaryDirectory() as folder:
        values = json.loads(shape.read_text()) | SMALL | {"torch_dtype": "float32"}
        (Path(folder) / "config.json").write_text(json.dumps(values))
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.save_pretrained(folder)
        wanted = generated(model.to(device), given, device, count)
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        with LLM(folder, dtype="float32", skip_tokenizer_init=True, max_model_len=512, **settings) as llm:
            done = llm.generate([{"prompt_token_ids": ids} for ids in given], params, use_tqdm=False)
    got = [list(one.outputs[0].token_ids) for one in done]
    return {"tokens": count, "same": [_same(one, other) for one, other in zip(got, wanted, strict=True)]}


def _same(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def shaped(shape: Path, folder: str, layers: int | None) -> None:
    """The shape's config in the folder, with so many layers if they are given."""
    values = json.loads(shape.read_text())
    (Path(folder) / "config.json").write_text(json.dumps(values | ({"num_hidden_layers": layers} if layers else {})))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=Path, help="a config.json")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, help="so many layers in place of the shape's")
    parser.add_argument("--batch-sizes", default="1,8,32")
    parser.add_argument("--peer-device", default="cuda:0")
    parser.add_argument("--output", type=Path, required=True)
    return parser.parse_args(words)


def main() -> None:
    given = arguments()
    sizes = [int(part) for part in given.batch_sizes.split(",")]
    own = {"backend": given.backend, "dtype": given.dtype}
    said: dict[str, Any] = {"shape": given.shape.name, "layers": given.layers, "dtype": given.dtype}
    said |= {"prompt": PROMPT, "answer": ANSWER}
    with tempfile.TemporaryDirectory() as folder:
        shaped(given.shape, folder, given.layers)
        steps: dict[str, Callable[[], Any]] = {
            "agreement": lambda: agreement(given.shape, given.peer_device, backend=given.backend),
            "pagedkv": lambda: engine(Path(folder), sizes, **own),
            "pagedkv_eager": lambda: engine(Path(folder), sizes, enforce_eager=True, **own),
            "transformers": lambda: peer(Path(folder), given.peer_device, given.dtype, sizes),
        }
        for name, run in steps.items():
            said[name] = run()
            print(name, said[name], flush=True)
            given.output.write_text(json.dumps(said, indent=2) + "\n")


if __name__ == "__main__":
    main()
