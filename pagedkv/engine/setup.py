"""From settings to a running engine's parts: choose, check, size, load; what a check can refuse is not read first."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

from pagedkv import plugins
from pagedkv.api import (
    AttentionBackend,
    GroupSpec,
    LayerSpec,
    Limits,
    OpSpec,
    Pool,
    PoolCost,
    PoolSpec,
    UnsupportedError,
)
from pagedkv.api.errors import ConfigError
from pagedkv.config import DTYPES, KV_DTYPES, EngineConfig, claim_options, show_bytes
from pagedkv.core.negotiation import BATCH_INVARIANT, Choice, Requirements, negotiate
from pagedkv.core.price import Price
from pagedkv.core.scheduler import MAX_SCORED, Scheduler, SchedulerConfig
from pagedkv.core.tiers import HostMemory
from pagedkv.engine.graphs import graph_plan, recorded
from pagedkv.engine.memory import MemoryPlan, MemoryRequest, available, choose_host, plan_memory, read_memory
from pagedkv.engine.profile import Measured, bind_sinks, measured
from pagedkv.engine.quantization import (
    against_packing,
    check_packing,
    describe,
    describe_cache,
    name_of,
    weights_note,
)
from pagedkv.engine.runner import Runner
from pagedkv.engine.swap import HostPlan, Swap
from pagedkv.models.bridge import BridgedCheckpoint, BridgedConfig
from pagedkv.models.checkpoint import Checkpoint, open_checkpoint
from pagedkv.models.config import ModelConfig
from pagedkv.models.decoder import Decoder
from pagedkv.models.pooling import Pooling
from pagedkv.models.tokenizer import Tokenizer
from pagedkv.models.weight_plan import WeightPlan
from pagedkv.ops import REFERENCE, Linear, resolve
from pagedkv.sampling.sampler import DeviceOps

_log = logging.getLogger("pagedkv.engine")

Progress = Callable[..., None]
"""Called with what is done and how much there is in all; with a name for it as `what`, unless it is weights."""
AnyCheckpoint = Checkpoint | BridgedCheckpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What an engine is made of, and what was chosen for it.

    `quantization`: which weights are packed, or "none"; `pooling`: how the model makes vectors, None where it makes
    text.
    """

    config: EngineConfig
    backend_name: str
    distribution: str | None
    version: str | None
    choice: Choice
    quantization: str
    memory: MemoryPlan
    max_model_len: int
    scheduler: Scheduler
    runner: Runner
    swap: Swap | None
    tokenizer: Tokenizer | None
    end_ids: tuple[int, ...]
    vocab_size: int
    device_ops: DeviceOps | None
    pooling: Pooling | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What model, backend and user agreed on, and what that asks of memory; nothing has been allocated."""

    choice: Choice
    spec: PoolSpec
    weights: WeightPlan
    request: MemoryRequest


def build(config: EngineConfig, progress: Progress | None = None) -> Parts:
    """Select the backend, open the model, negotiate, size the memory, then load weights."""
    selected = plugins.select(config.backend, device=config.device)
    accepted = {alias: o.name for o in selected.descriptor.options for alias in (o.name, *o.aliases)}
    options = plugins.check_options(selected.descriptor, claim_options(config, accepted, selected.name))
    offer = plugins.offer(selected)
    # First without the model: what no model could change is refused before a file is opened. Exclusions may depend on
    # the checkpoint's dtype.
    negotiate(dataclasses.replace(offer, exclusions=()), _requirements(config, None), backend=selected.name)
    checkpoint = _open(config)
    try:
        _max_model_len(config, checkpoint)
        negotiate(offer, _requirements(config, checkpoint.config), backend=selected.name)
        backend = plugins.create(selected, options)
        try:
            with plugins.untouched(selected.found, "starting the engine"):
                return _load(config, selected, backend, checkpoint, progress)
        except BaseException:
            backend.close()
            raise
    finally:
        checkpoint.close()


def model_requirements(config: EngineConfig) -> Requirements:
    """What the model of `config` asks of whichever backend runs it: its files are opened, no weight is read."""
    checkpoint = _open(config)
    try:
        return _requirements(config, checkpoint.config)
    finally:
        checkpoint.close()


def _open(config: EngineConfig) -> AnyCheckpoint:
    return open_checkpoint(
        config.model,
        load_format=config.load_format,
        tokenizer=config.tokenizer,
        revision=config.revision,
        model_impl=config.model_impl,
    )


def agree(
    config: EngineConfig, selected: plugins.Selected, backend: AttentionBackend, checkpoint: AnyCheckpoint
) -> Agreed:
    """Negotiate, decide how weights are held, and count what is needed: no weight is read, nothing is told."""
    requirements = _requirements(config, checkpoint.config)
    choice = _only_promised(
        negotiate(backend.capabilities(), requirements, backend=selected.name), config, backend, selected.name
    )
    spec = _pool_spec(config, choice, requirements.layers, _max_model_len(config, checkpoint))
    weights = _weights(config, selected, backend, checkpoint, choice)
    request = _request(config, selected, backend, checkpoint, choice, spec, weights)
    return Agreed(choice=choice, spec=spec, weights=weights, request=request)


def _load(
    config: EngineConfig,
    selected: plugins.Selected,
    backend: AttentionBackend,
    checkpoint: AnyCheckpoint,
    progress: Progress | None,
) -> Parts:
    agreed = agree(config, selected, backend, checkpoint)
    choice, spec, weights, request = agreed.choice, agreed.spec, agreed.weights, agreed.request
    max_model_len = spec.limits.context
    for note in (*choice.notes, *describe_cache(choice.kv_dtype)):
        _log.info("%s", note)
    if isinstance(checkpoint.config, BridgedConfig):
        _log.info("batch_invariant off: the products of transformers' modules depend on the batch")
    if line := describe(weights, choice.dtype):
        _log.info("%s", line)
    memory = _plan(request, selected, backend, spec)
    _log.info("memory budget\n%s", memory.table())
    tokenizer = None if config.skip_tokenizer_init else checkpoint.tokenizer()
    model = checkpoint.decoder(backend, choice.dtype, weights, max_model_len, progress)
    vocab_size = checkpoint.config.vocab_size
    recording = graph_plan(config, backend.capabilities(), choice.features, model, max_model_len)
    given = most_given(checkpoint, spec)
    if (found := measured(backend, model, spec, recording, vocab_size, given)) is not None:
        memory = _plan_again(request, memory, found, selected, backend, spec)
        recording = recording if found.graphs else None
    _log_features(config, choice, memory, max_model_len)
    runner = _runner(backend, dataclasses.replace(spec, num_blocks=memory.num_blocks), model)
    if recording is not None:
        runner.graphs = recorded(backend, runner.pool, model, recording, vocab_size, progress)
    facts = (str(checkpoint.path), choice.dtype, choice.kv_dtype, choice.block_size, weights.formats)
    sizes = _scheduler_config(config, memory, choice, max_model_len, _most_scored(checkpoint, spec))
    swap = _swap(config, backend, runner.pool, memory.host)
    host = None if swap is None else HostMemory(more=swap.more, caching=_caches_on_host(config))
    price = None if swap is None else swap.price
    return Parts(
        config=config,
        backend_name=selected.name,
        distribution=selected.distribution,
        version=selected.version,
        choice=choice,
        quantization=name_of(weights),
        memory=memory,
        max_model_len=max_model_len,
        scheduler=Scheduler(sizes, repr(facts).encode(), memory=host, price=price),
        runner=runner,
        swap=swap,
        tokenizer=tokenizer,
        end_ids=_end_ids(checkpoint, tokenizer),
        vocab_size=vocab_size,
        device_ops=_device_ops(backend, vocab_size),
        pooling=checkpoint.config.pooling,
    )


def _runner(backend: AttentionBackend, spec: PoolSpec, model: Decoder) -> Runner:
    """The model over its pool."""
    pool = backend.alloc_pool(spec)
    bind_sinks(backend, pool, model)
    return Runner(backend, pool, model, nan_safe="nan_safe" in backend.capabilities().features)


def _device_ops(backend: AttentionBackend, vocab_size: int) -> DeviceOps | None:
    """The backend's own ops of sampling, None if it has none; where it has one, the most probable ids need no copy."""
    spec = OpSpec(dtype="fp32", dims={"vocab": vocab_size})
    greedy, sample = backend.op("greedy", spec), backend.op("sample", spec)
    if greedy is None and sample is None:
        return None
    ops = DeviceOps(greedy=greedy or REFERENCE["greedy"], sample=sample, to_host=backend.to_host)
    ops.warm_up(vocab_size, backend.torch_device)
    return ops


def _caches_on_host(config: EngineConfig) -> bool:
    return config.enable_prefix_caching and config.enable_host_caching


def _swap(config: EngineConfig, backend: AttentionBackend, pool: Pool, plan: HostPlan | None) -> Swap | None:
    """The copies to host memory and their first price, which is told; None without such memory."""
    if plan is None:
        if config.preemption_mode == "swap":
            _log.warning("preemption_mode=swap has no host memory to swap to: preempted requests are computed again")
        return None
    given = {"bandwidth": config.copy_bytes, "prefill": config.prefill_rate}
    price = Price(
        block_bytes=plan.cost.per_block,
        mode=config.preemption_mode,
        bandwidth=config.copy_bytes,
        prefill=config.prefill_rate,
        fixed=frozenset(name for name, value in given.items() if value is not None),
    )
    swap = Swap(backend, pool, plan, price)
    swap.measure()
    if price.bandwidth is None:
        return swap  # there is no host memory, as was said
    _log.info(
        "host memory for up to %d blocks (%s), made when needed; copies %s/s (%s)%s; preempted requests: %s",
        plan.blocks,
        show_bytes(plan.nbytes),
        show_bytes(int(price.bandwidth or 0)),
        "given" if "bandwidth" in price.fixed else "measured",
        "; evicted cached blocks are kept there" if _caches_on_host(config) else "",
        "whichever is cheaper, copies or computing again" if price.mode == "auto" else price.mode,
    )
    return swap


def _only_promised(choice: Choice, config: EngineConfig, backend: AttentionBackend, name: str) -> Choice:
    """Without batch invariance where nobody keeps it: torch's own product, the reference, depends on the batch."""
    own = resolve(backend, "linear", OpSpec(dtype=choice.dtype, dims={"n": 64, "k": 64}))
    if BATCH_INVARIANT not in choice.features or not isinstance(own, Linear):
        return choice
    why = f"backend {name} has no linear op of its own here, and torch's product depends on the batch"
    if config.batch_invariant:
        raise UnsupportedError(f"batch_invariant=True cannot be kept: {why}; leave it unset, or choose another backend")
    notes = [note for note in choice.notes if not note.startswith(BATCH_INVARIANT)]
    kept = choice.features - {BATCH_INVARIANT}
    return dataclasses.replace(choice, features=kept, notes=(*notes, f"{BATCH_INVARIANT} False: {why}"))


def _weights(
    config: EngineConfig,
    selected: plugins.Selected,
    backend: AttentionBackend,
    checkpoint: AnyCheckpoint,
    choice: Choice,
) -> WeightPlan:
    """How the weights will be held, checked against what was asked for."""
    weights = checkpoint.plan(backend, choice.dtype, against_packing(config, checkpoint))
    check_packing(config, weights, backend.capabilities(), selected.name)
    return weights


def _requirements(config: EngineConfig, model: ModelConfig | BridgedConfig | None) -> Requirements:
    return Requirements(
        layers=model.layer_specs() if model else (),
        dtype=DTYPES[config.dtype],
        checkpoint_dtype=model.dtype if model else None,
        kv_dtype=KV_DTYPES[config.kv_cache_dtype],
        block_size=config.block_size,
        features=frozenset({"mixed_batch", "prefix_hit"}),
        batch_invariant=_batch_invariant(config, model),
    )


def _batch_invariant(config: EngineConfig, model: ModelConfig | BridgedConfig | None) -> bool | None:
    """What to ask of the backend; a bridged model's own products depend on the batch, whatever the backend does."""
    if not isinstance(model, BridgedConfig):
        return config.batch_invariant
    if config.batch_invariant:
        raise ConfigError(
            f"batch_invariant=True cannot be kept with {model.model_type}, which runs through transformers: its "
            "products depend on the batch. Leave it out"
        )
    return False


def _max_model_len(config: EngineConfig, checkpoint: AnyCheckpoint) -> int:
    limit = checkpoint.config.max_position
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is more than the model's own limit of {limit} positions"
        )
    return config.max_model_len


def _pool_spec(config: EngineConfig, choice: Choice, layers: tuple[LayerSpec, ...], max_model_len: int) -> PoolSpec:
    return PoolSpec(
        groups=(GroupSpec(layers=layers, block_size=choice.block_size, kv_dtype=choice.kv_dtype),),
        num_blocks=2,
        dtype=choice.dtype,
        limits=Limits(rows=config.max_num_seqs, tokens=config.max_num_batched_tokens, context=max_model_len),
        features=choice.features,
    )


def _request(
    config: EngineConfig,
    selected: plugins.Selected,
    backend: AttentionBackend,
    checkpoint: AnyCheckpoint,
    choice: Choice,
    spec: PoolSpec,
    weights: WeightPlan,
) -> MemoryRequest:
    """What is asked of the memory, with an upper bound of the workspace."""
    return MemoryRequest(
        num_blocks=config.num_blocks,
        kv_cache_bytes=config.kv_cache_bytes,
        fraction=config.gpu_memory_utilization,
        weights=weights.nbytes,
        weights_note=weights_note(weights),
        host=_host(config, selected, backend, spec),
        workspace=workspace(checkpoint, spec),
        block_size=choice.block_size,
        max_num_seqs=spec.limits.rows,
        max_model_len=spec.limits.context,
    )


def workspace(checkpoint: AnyCheckpoint, spec: PoolSpec) -> int:
    """Bytes of activations and logits that a step within the limits of `spec` takes, an upper bound."""
    return checkpoint.workspace(spec.limits.tokens, most_given(checkpoint, spec), spec.dtype)


def most_given(checkpoint: AnyCheckpoint, spec: PoolSpec) -> int:
    """Of how many tokens a step gives logits, or hidden states, at most."""
    return spec.limits.rows + min(_most_scored(checkpoint, spec), spec.limits.tokens)


def _most_scored(checkpoint: AnyCheckpoint, spec: PoolSpec) -> int:
    """Logits are large, so few positions of prompts have theirs given; hidden states may be wanted of all."""
    return MAX_SCORED if checkpoint.config.pooling is None else spec.limits.tokens


def _plan(request: MemoryRequest, selected: plugins.Selected, backend: AttentionBackend, spec: PoolSpec) -> MemoryPlan:
    """The budget by what the backend says of its memory now."""
    return budget(request, plugins.pool_cost(selected, backend, spec), backend, selected.name)


def budget(request: MemoryRequest, cost: PoolCost, backend: AttentionBackend, name: str) -> MemoryPlan:
    """The plan for a pool of this cost, by what the backend says of its memory now; errors as `plan_memory`'s."""

    def kv_budget(fraction: float | None, reserved: int) -> int | None:
        return read_memory(lambda: backend.kv_budget(fraction, reserved), name)

    return plan_memory(request, cost, read_memory(backend.memory, name), kv_budget)


def _plan_again(
    request: MemoryRequest,
    before: MemoryPlan,
    found: Measured,
    selected: plugins.Selected,
    backend: AttentionBackend,
    spec: PoolSpec,
) -> MemoryPlan:
    """The budget once the weights are there and the largest step has been measured; told."""
    had = available(before.memory)
    known = dataclasses.replace(
        request,
        workspace=request.workspace if found.workspace is None else found.workspace,
        graphs=found.graphs,
        loaded=True,
        most_available=None if had is None else had - request.weights,
    )
    plan = dataclasses.replace(_plan(known, selected, backend, spec), memory=before.memory)
    _log.info("memory budget, the largest step measured\n%s", plan.table())
    return plan


def _host(
    config: EngineConfig, selected: plugins.Selected, backend: AttentionBackend, spec: PoolSpec
) -> HostPlan | None:
    def cost() -> PoolCost:
        return plugins.pool_cost(selected, backend, dataclasses.replace(spec, placement="host"))

    memory = read_memory(backend.memory, selected.name)
    return choose_host(config, backend.capabilities().placements, memory, cost, selected.name)


def _scheduler_config(
    config: EngineConfig, memory: MemoryPlan, choice: Choice, max_model_len: int, max_scored: int
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=memory.num_blocks,
        block_size=choice.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        chunked_prefill=config.enable_chunked_prefill,
        prefix_caching=config.enable_prefix_caching,
        max_overtakes=config.max_overtakes,
        max_scored=max_scored,
        max_preemptions=config.max_preemptions,
    )


def _log_features(config: EngineConfig, choice: Choice, memory: MemoryPlan, max_model_len: int) -> None:
    def switch(on: bool) -> str:
        return "on" if on else "off"

    _log.info(
        "dtype %s, cache %s, block size %d; prefix caching %s, chunked prefill %s (%d tokens a step), "
        "batch-invariant results %s",
        choice.dtype,
        choice.kv_dtype,
        choice.block_size,
        switch(config.enable_prefix_caching),
        switch(config.enable_chunked_prefill),
        config.max_num_batched_tokens,
        switch("batch_invariant" in choice.features),
    )
    room = (memory.num_blocks - 1) * choice.block_size
    if room + 1 < max_model_len:
        _log.warning(
            "the cache holds %d tokens, less than max_model_len=%d: longer requests are refused at submission "
            "(kv_cache_memory or num_blocks raises it; %s would do)",
            room,
            max_model_len,
            show_bytes(memory.cost.fixed + memory.cost.per_block * (-(-max_model_len // choice.block_size) + 1)),
        )


def _end_ids(checkpoint: AnyCheckpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    ids = dict.fromkeys(checkpoint.config.eos_token_ids)
    if tokenizer is not None:
        ids |= dict.fromkeys(tokenizer.eos_token_ids)
    return tuple(i for i in ids if 0 <= i < checkpoint.config.vocab_size)
