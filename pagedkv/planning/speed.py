"""Tokens a second to expect, as an interval: what must be read over the bandwidth, what is computed over the rate.

    step(B)    = read(weights) or products, whichever is longer + read(keys, values of B contexts) + the host's part
    prompt(n)  = products of n tokens + attention over them + the host's part

Each limit is reached in part only; `rates.toml` has the parts and where they were measured. The fast end takes the best
of each, the slow end the worst.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

from pagedkv.api import GroupSpec
from pagedkv.engine.setup import Agreed, AnyCheckpoint
from pagedkv.models.config import ModelConfig
from pagedkv.models.packing import element_bytes
from pagedkv.models.tensor_shapes import tensor_shapes
from pagedkv.models.weight_plan import TABLE
from pagedkv.ops.gguf_quants import named_type
from pagedkv.planning.cost import read_bytes
from pagedkv.planning.devices import read_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Limits of a device: bytes a second, operations a second in the model's dtype; `basis` names a table of parts."""

    bandwidth: float
    peak: float
    basis: str
    source: str

    @property
    def parts(self) -> Mapping[str, Any]:
        """What part of the limits is reached."""
        parts: Mapping[str, Any] = read_data("rates.toml")[self.basis]
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """From `low` to `high`; `middle` is their geometric mean."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """What is compared with a measurement."""
        return sqrt(self.low * self.high)

    def figures(self) -> dict[str, float]:
        """As JSON values."""
        return {"low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a model asks of a device. `step_bytes`: weights that a step reads at most.

    `body` and `head`: operations for one token, without and in the last product. `expert_bytes` of the weights are
    experts', of which a token takes `expert_share`.
    """

    group: GroupSpec
    step_bytes: int
    body: float
    head: float
    expert_bytes: int = 0
    expert_share: float = 1.0
    packed: bool = False

    def weights_read(self, batch: int) -> float:
        """Bytes of weights in a step: all, but of the experts only those that some of `batch` tokens take."""
        idle = (1 - self.expert_share) ** batch
        return self.step_bytes - self.expert_bytes * idle

    def attention(self, tokens: int) -> float:
        """Operations of attention over one prompt: two products, of each query with the keys before it."""
        return sum(
            2.0 * layer.q_heads * (layer.k_dim + layer.v_dim) * _pairs(tokens, layer.window)
            for layer in self.group.layers
        )


def _pairs(tokens: int, window: int | None) -> float:
    seen = min(tokens, window or tokens)
    return seen * (seen + 1) / 2 + (tokens - seen) * seen


def work_of(checkpoint: AnyCheckpoint, agreed: Agreed) -> Work:
    """What the model asks for; a model of transformers counts as dense, every weight in every step."""
    config, group = checkpoint.config, agreed.spec.groups[0]
    if not isinstance(config, ModelConfig):
        operations = 2.0 * config.num_parameters
        return Work(group=group, step_bytes=agreed.weights.nbytes, body=operations, head=0.0)
    numbers = {name: prod(shape) for name, shape in tensor_shapes(config).items()}
    vocabulary = config.vocab_size * config.hidden_size
    experts = sum(count for name, count in numbers.items() if ".experts." in name)
    share = 1.0 if config.experts is None else config.experts.per_token / config.experts.num
    head = vocabulary if config.pooling is None else 0
    multiplied = sum(numbers.values()) - (0 if config.tie_word_embeddings else vocabulary)
    read = agreed.weights.nbytes - _table_bytes(checkpoint, config, agreed)
    return Work(
        group=group,
        step_bytes=read,
        body=2.0 * (multiplied - head - experts * (1 - share)),
        head=2.0 * head,
        expert_bytes=read * experts // multiplied,
        expert_share=share,
        packed=bool(agreed.weights.packed),
    )


def _table_bytes(checkpoint: AnyCheckpoint, config: ModelConfig, agreed: Agreed) -> int:
    """Bytes of an embedding table that no product reads: the head is another tensor, its own copy, or none."""
    if config.tie_word_embeddings and not agreed.weights.twice:
        return 0
    count = config.vocab_size * config.hidden_size
    if TABLE in agreed.weights.packed:
        return named_type(checkpoint.formats[TABLE]).nbytes(count)
    return count * element_bytes(agreed.choice.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Predictions for one model on one device."""

    work: Work
    rates: Rates

    def decode(self, batch: int, context: int) -> Interval:
        """Tokens a second of `batch` sequences that each have `context` tokens, one new token each a step."""
        return self._interval(batch, lambda fast: self._step(batch, context, fast))

    def prefill(self, tokens: int, prompts: int = 1) -> Interval:
        """Prompt tokens a second of prompts of `tokens` tokens."""
        return self._interval(tokens * prompts, lambda fast: self._prompts(tokens, prompts, fast))

    def _interval(self, tokens: int, seconds: Any) -> Interval:
        return Interval(low=tokens / seconds(False), high=tokens / seconds(True))

    def _step(self, batch: int, context: int, fast: bool) -> float:
        read = self.work.weights_read(batch) / (self.rates.bandwidth * self._part("read", fast))
        computed = batch * (self.work.body + self.work.head) / self._product_rate(fast)
        cache = batch * read_bytes(self.work.group, context)
        attended = cache / (self.rates.bandwidth * self._part("attention_read", fast))
        return max(read, computed) + attended + self._host(batch, fast)

    def _prompts(self, tokens: int, prompts: int, fast: bool) -> float:
        products = prompts * (tokens * self.work.body + self.work.head) / self._product_rate(fast)
        read = self.work.step_bytes / (self.rates.bandwidth * self._part("read", fast))
        attended = prompts * self.work.attention(tokens) / (self.rates.peak * self._part("attention", fast))
        return max(products, read) + attended + self._host(prompts, fast)

    def _product_rate(self, fast: bool) -> float:
        return self.rates.peak * self._part("packed" if self.work.packed else "product", fast)

    def _host(self, rows: int, fast: bool) -> float:
        """Seconds of a step beside the device's work."""
        return len(self.work.group.layers) * self._part("layer", not fast) + rows * self._part("row", not fast)

    def _part(self, name: str, fast: bool) -> float:
        low, high = self.rates.parts[name]
        return float(high if fast else low)
