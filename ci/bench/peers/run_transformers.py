"""transformers' `generate`: a static batch, its default cache, no padding since all prompts are equally long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from protocol import Clock, Run, serve, timed


class Ticker:
    """A streamer: `generate` hands it the prompts first, then the tokens of each step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._prompts_came = False

    def put(self, value: object) -> None:
        """The prompts, or one token of each request."""
        if self._prompts_came:
            self._clock.tokens()
        self._prompts_came = True

    def end(self) -> None:
        """Nothing is open."""


def load(given: Mapping[str, Any]) -> tuple[Run, dict[str, Any]]:
    """The model of the folder in the dtype that was asked for."""
    torch.set_num_threads(given["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(given["folder"], dtype=getattr(torch, given["dtype"]))
    model.eval().generation_config.eos_token_id = None  # an end token is a token like any other

    @torch.inference_mode()
    def generate(prompts: Sequence[Sequence[int]], count: int, clock: Clock) -> list[list[int]]:
        ids = torch.tensor(prompts)
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
            streamer=Ticker(clock),
        )
        tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return tokens

    attention = model.config._attn_implementation
    return timed(generate), {
        "version": transformers.__version__,
        "torch": torch.__version__,
        "dtype": given["dtype"],
        "attention": attention,
        "cache": given["dtype"],
    }


if __name__ == "__main__":
    serve(load)
