"""A whole model through the engine on this backend: its greedy tokens are those of a plain float64 forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import LLM, SamplingParams
from pagedkv.api import Capabilities
from pagedkv.conformance.kit import Kit
from pagedkv.conformance.lattice import PLAIN, combines
from pagedkv.conformance.quantized import FLOAT8, QUANTIZED, codes, decoded, token_scales
from pagedkv.conformance.subject import Subject
from pagedkv.conformance.tiny_model import Stored, TinyConfig, TinyLlama

pytestmark = [
    pytest.mark.level("engine"),
    pytest.mark.applies.with_args(lambda can: {"mixed_batch", "prefix_hit"} <= can.features),
]

NEAR = {"fp32": 1e-3, "fp16": 0.1, "bf16": 0.8}
"""Logits (of about unit size times 7) this near to the largest may be taken for it, by dtype."""

NEW = 6
"""Tokens generated for each prompt."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The model on disk, its oracle, and how engines are opened on the backend under test."""

    kit: Kit
    model: TinyLlama
    folder: Path

    @property
    def block(self) -> int:
        return self.kit.block_size

    def open(self, **settings: Any) -> LLM:
        subject = self.kit.subject
        fields: dict[str, Any] = {
            "backend": subject.name,
            "device": subject.device.index,
            "backend_options": dict(subject.options),
            "skip_tokenizer_init": True,
            "dtype": self.model.config.dtype,
            "kv_cache_dtype": self.kit.kv_dtype if self.kit.kv_dtype in PLAIN else "auto",
            "block_size": self.block,
            "max_model_len": self.model.config.max_length,
            "num_blocks": 64,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
        }
        return LLM(self.folder, **fields | settings)

    def prompts(self, *lengths: int) -> list[list[int]]:
        rng = np.random.default_rng(lengths)
        return [rng.integers(0, self.model.config.vocab, length).tolist() for length in lengths]

    def check(
        self, prompt: Sequence[int], tokens: Sequence[int], mistake: str = "", stored: Stored = lambda x: x
    ) -> None:
        """Each token is the oracle's largest logit, or as near to it as rounding explains."""
        assert len(tokens) == NEW, f"{len(tokens)} tokens came, {NEW} were asked for"
        logits = self.model.logits([*prompt, *tokens[:-1]], stored)[len(prompt) - 1 :]
        behind = logits.max(1) - logits[np.arange(NEW), list(tokens)]
        worst = int(behind.argmax())
        near = NEAR[self.model.config.dtype]
        self.kit.report("worst_logit_gap", max(0.0, float(behind.max())))
        assert behind[worst] <= near, (
            f"token {worst} of {len(tokens)} after a prompt of {len(prompt)} has a logit {behind[worst]:.3g} below the "
            f"largest, allowed {near}{f': {mistake}' if mistake else ''}"
        )


@pytest.fixture(scope="module")
def model(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyLlama, Path]:
    """A model of a head size and dtype that the backend declares, as files."""
    kit = Kit(subject, lambda name, value: None)
    config = TinyConfig(
        head_dim=_even(kit.head_dim),
        q_heads=2 * kit.group,
        kv_heads=2,
        dtype=kit.dtype,
        max_length=8 * kit.block_size + 64,
    )
    made = TinyLlama(config)
    return made, made.save(tmp_path_factory.mktemp("tiny-llama"))


def _even(head_dim: int) -> int:
    """Rotary positions come in pairs."""
    if head_dim % 2:
        pytest.skip(f"the smallest head dim this backend declares is {head_dim}, and rotary positions need an even one")
    return head_dim


@pytest.fixture
def stage(kit: Kit, model: tuple[TinyLlama, Path]) -> Iterator[Stage]:
    """What a case works with."""
    yield Stage(kit, *model)


def greedy(**settings: Any) -> SamplingParams:
    """Greedy to the length."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "detokenize": False} | settings)


def generate(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams | None = None) -> list[Any]:
    """The outputs, in the order of the prompts."""
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return list(llm.generate(asked, params or greedy(), use_tqdm=False))


@pytest.mark.law("engine: greedy tokens are those of a plain float64 forward")
def test_greedy(stage: Stage) -> None:
    prompts = stage.prompts(1, stage.block - 1, stage.block, 2 * stage.block + 1)
    with stage.open() as llm:
        for prompt, output in zip(prompts, generate(llm, prompts), strict=True):
            stage.check(prompt, output.outputs[0].token_ids)
    _tells_right_from_wrong(stage, prompts[-1])


def _tells_right_from_wrong(stage: Stage, prompt: Sequence[int]) -> None:
    """The oracle's own margins are wide enough for the case to mean something."""
    logits = np.sort(stage.model.logits(prompt), axis=1)
    clear = float((logits[:, -1] - logits[:, -2] > NEAR[stage.model.config.dtype]).mean())
    assert clear > 0.4, f"only {clear:.0%} of this model's tokens are clear: the case cannot tell right from wrong"


@pytest.mark.law("engine: a prompt computed in chunks gives the same tokens")
def test_chunked_prefill(stage: Stage) -> None:
    prompts = stage.prompts(3 * stage.block + 2, 2)
    budget = max(4, stage.block // 2 + 1)
    with stage.open(max_num_batched_tokens=budget) as llm:
        for prompt, output in zip(prompts, generate(llm, prompts), strict=True):
            stage.check(prompt, output.outputs[0].token_ids, "chunks of a prompt must see the chunks before them")


@pytest.mark.law("engine: a prefix found in the cache gives the same tokens")
def test_prefix_hit(stage: Stage) -> None:
    shared, *ends = stage.prompts(2 * stage.block + 1, 3, 5)
    with stage.open() as llm:
        generate(llm, [shared])
        for end in ends:
            prompt = shared[: 2 * stage.block] + end
            output = generate(llm, [prompt])[0]
            assert output.num_cached_tokens >= 2 * stage.block, "the second run found nothing in the cache"
            stage.check(prompt, output.outputs[0].token_ids, "reused blocks must read as they were written")


def _declares(kv_dtype: str) -> Any:
    """The parameter of a case that applies where a model of the kit's dtype may have such a cache."""

    def applies(can: Capabilities) -> bool:
        return combines(can, "fp32" if "fp32" in can.dtypes else can.dtypes[0], kv_dtype)

    return pytest.param(kv_dtype, marks=pytest.mark.applies.with_args(applies))


def _rounded(kv_dtype: str) -> Stored:
    """What a cache keeps whose scales nobody bound."""

    def stored(x: torch.Tensor) -> torch.Tensor:
        numbers = x.float().numpy()
        scale = np.ones(numbers.shape[:2], np.float32) if kv_dtype in FLOAT8 else token_scales(numbers)
        return torch.from_numpy(decoded(kv_dtype, codes(kv_dtype, numbers, scale), scale))

    return stored


@pytest.mark.level("quantized_kv")
@pytest.mark.law("quantized_kv: greedy tokens are those of a forward that rounds keys and values likewise")
@pytest.mark.parametrize("kv_dtype", [_declares(name) for name in QUANTIZED])
def test_quantized_cache(stage: Stage, kv_dtype: str) -> None:
    shared, *prompts = stage.prompts(2 * stage.block + 1, 1, stage.block, 3)
    prompts[-1] = shared[: 2 * stage.block] + prompts[-1]
    with stage.open(kv_cache_dtype=kv_dtype) as llm:
        outputs = [*generate(llm, [shared]), *generate(llm, prompts)]
    assert outputs[-1].num_cached_tokens >= 2 * stage.block, "the last prompt found nothing in the cache"
    for prompt, output in zip([shared, *prompts], outputs, strict=True):
        mistake = "other scales, or blocks reused without theirs"
        stage.check(prompt, output.outputs[0].token_ids, mistake, _rounded(kv_dtype))


@pytest.mark.law("engine: requests that are preempted and computed again give the same tokens")
def test_preemption(stage: Stage) -> None:
    prompts = stage.prompts(*(2 * stage.block - 1 - i for i in range(4)))
    with stage.open(num_blocks=6, max_num_seqs=3, enable_prefix_caching=False) as llm:
        outputs = generate(llm, prompts)
        preempted = sum(output.metrics.num_preemptions for output in outputs)
    assert preempted > 0, "the cache was large enough for everybody: the case shows nothing"
    for prompt, output in zip(prompts, outputs, strict=True):
        stage.check(prompt, output.outputs[0].token_ids, "blocks of a preempted request belong to others by now")


@pytest.mark.law("engine: samples that share a prompt's blocks do not disturb each other")
def test_two_samples(stage: Stage) -> None:
    prompt, other = stage.prompts(stage.block + 2, 3)
    params = greedy(n=2, temperature=1.0, seed=5, logprobs=1)
    with stage.open() as llm:
        output = generate(llm, [prompt, other], params)[0]
    for sample in output.outputs:
        logits = stage.model.logits([*prompt, *sample.token_ids[:-1]])[len(prompt) - 1 :]
        wanted = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        wanted -= logits.max(1, keepdims=True)
        got = [record[token].logprob for record, token in zip(sample.logprobs, sample.token_ids, strict=True)]
        gap = np.abs(np.array(got) - wanted[np.arange(NEW), sample.token_ids]).max()
        assert gap <= NEAR[stage.model.config.dtype], (
            f"sample {sample.index} has log-probabilities {gap:.3g} off: its blocks hold the other sample's tokens"
        )


@pytest.mark.law("engine: in batch-invariant mode a request has the same tokens alone and in company")
@pytest.mark.needs("batch_invariant")
@pytest.mark.applies.with_args(lambda can: "fp32" in can.dtypes)
def test_alone_and_together(stage: Stage) -> None:
    prompts = stage.prompts(stage.block + 3, 3, 2 * stage.block)
    with stage.open(batch_invariant=True, enable_prefix_caching=False) as llm:
        params = greedy(logprobs=1)
        together = generate(llm, prompts, params)
        alone = [generate(llm, [prompt], params)[0] for prompt in prompts]
    for one, other in zip(alone, together, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids, "company changed the tokens"
        assert one.outputs[0].logprobs == other.outputs[0].logprobs, "company changed bits of the log-probabilities"
