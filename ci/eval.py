"""What packed weights cost in quality: perplexity of one GGUF file, packed and dequantized to float32, on one text.

    python ci/eval.py demo --tokens 20000

The text is English prose about Python: the chapters of its language reference that come with every interpreter, in the
module `pydoc_data.topics` (PSF licence). Another version of Python has another text, so figures name the version; the
ratio compares both runs on the same one. Exit code 1 where it is above --most.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from pydoc_data.topics import topics

from pagedkv import LLM
from pagedkv.engine.scoring import Score
from pagedkv.models.tokenizer import Tokenizer

CONTEXT, STRIDE = 1024, 960
RUNS = {"packed": {"quantization": "gguf"}, "float32": {"dtype": "float32"}}


def reference_text(tokenizer: Tokenizer, tokens: int) -> str:
    """Whole chapters in alphabetical order, of at least so many tokens together. Raises `ValueError` for too many."""
    chapters, count = [], 0
    for name in sorted(topics):
        chapters.append(topics[name])
        count += len(tokenizer.encode(topics[name]))
        if count >= tokens:
            return "\n".join(chapters)
    raise ValueError(f"the text has {count} tokens, not {tokens}: lower --tokens")


def measured(model: str, tokens: int, backend: str | None, settings: dict[str, str]) -> Score:
    """Perplexity with these settings, in windows of `CONTEXT` tokens."""
    with LLM(model, backend=backend, max_model_len=CONTEXT, max_num_seqs=4, **settings) as llm:
        tokenizer = llm.engine.tokenizer
        if tokenizer is None:
            raise ValueError(f"{model} has no tokenizer")
        (score,) = llm.score([reference_text(tokenizer, tokens)], context=CONTEXT, stride=STRIDE)
        print(f"quantization {llm.engine.parts.quantization}", end=", ")
    return score


def main() -> int:
    """Run both and print perplexities and ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo", help="a .gguf file, or demo")
    parser.add_argument("--tokens", type=int, default=20_000, help="least tokens of the text (default 20000)")
    parser.add_argument("--most", type=float, default=1.01, help="the largest ratio that passes (default 1.01)")
    parser.add_argument("--backend", help="another backend than the automatic one")
    args = parser.parse_args()
    print(
        f"{args.model}, language reference of Python {platform.python_version()}, windows of {CONTEXT}, {STRIDE} apart"
    )
    found = {}
    for name, settings in RUNS.items():
        began = time.monotonic()
        score = measured(args.model, args.tokens, args.backend, settings)
        found[name] = score.perplexity
        print(f"{name}: perplexity {score.perplexity:.4f}, {score.tokens} tokens, {time.monotonic() - began:.0f} s")
    ratio = found["packed"] / found["float32"]
    print(f"packed / float32: {ratio:.5f} ({'at most' if ratio <= args.most else 'ABOVE'} {args.most})")
    return 0 if ratio <= args.most else 1


if __name__ == "__main__":
    sys.exit(main())
