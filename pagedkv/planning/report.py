"""A plan in words: (name, text) pairs in the order in which a person asks."""

from __future__ import annotations

from collections.abc import Iterator

from pagedkv.config import show_bytes
from pagedkv.planning.model import NOT_BUILT
from pagedkv.planning.plan import FITS, NOTHING, SHARED, SHORT, Plan, Prediction
from pagedkv.planning.speed import Interval


def show_rate(interval: Interval) -> str:
    """Tokens a second, from ... to ..., without digits that mean nothing."""
    return f"{_rounded(interval.low)} to {_rounded(interval.high)}"


def _rounded(rate: float) -> str:
    return f"{rate:.2g}" if rate < 10 else f"{float(f'{rate:.2g}'):,.0f}"


def lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """Everything but the table of sequences and the advice."""
    yield from _device(plan)
    yield from _bytes(plan)
    yield "verdict", _verdict(plan)


def _device(plan: Plan) -> Iterator[tuple[str, str]]:
    target = plan.fit.target
    memory = target.memory()
    where = "" if target.here else ", not this machine's"
    shared = " (shared with the host)" if memory.unified else ""
    yield "device", f"{target.title}{where}; backend {target.selected.name}"
    yield "memory", f"{show_bytes(memory.total)}, {show_bytes(memory.free)} available{shared}"
    if target.device is not None:
        yield "figures", target.device.source
        if target.device.note:
            yield "note", target.device.note
    if plan.ranks > 1:
        yield "ranks", f"{plan.ranks}, of which this is one: {NOT_BUILT}"


def _bytes(plan: Plan) -> Iterator[tuple[str, str]]:
    agreed, target = plan.fit.agreed, plan.fit.target
    choice, request = agreed.choice, agreed.request
    note = f" ({request.weights_note})" if request.weights_note else ""
    yield "weights", f"{show_bytes(request.weights)} in {choice.dtype}{note}"
    yield "workspace", f"{show_bytes(request.workspace)} for {agreed.spec.limits.tokens} tokens a step"
    per_block = f"{show_bytes(plan.cost.per_block)} a block of {choice.block_size}"
    yield "cache", f"{show_bytes(plan.per_token)} a token, {per_block}, in {choice.kv_dtype}, {target.cost}"
    if plan.records_steps:
        yield "graphs", "not counted: the engine measures what recorded decode steps take (enforce_eager: nothing)"
    if request.host is not None:
        where = "of this memory" if request.host.shared else "of the host's memory"
        yield "swap", f"up to {show_bytes(request.host.nbytes)} {where}"
    if plan.cost.fixed:
        yield "scratch", f"{show_bytes(plan.cost.fixed)} of the backend's own"
    if plan.memory is not None:
        yield "blocks", f"{plan.memory.num_blocks} ({show_bytes(plan.memory.cache)}), sized by {plan.memory.rule}"
    yield "longest", f"{plan.longest} tokens for one sequence alone"


def asked(plan: Plan) -> str:
    """What the settings ask for."""
    return f"{plan.fit.limits.rows} sequences of {plan.fit.limits.context} tokens"


def _verdict(plan: Plan) -> str:
    of_ceiling = f"of {show_bytes(plan.ceiling)} that may be taken"
    needed = f"{show_bytes(plan.needed)} {of_ceiling}"
    count = dict(plan.sequences)[plan.fit.limits.context]
    text = {
        FITS: f"{asked(plan)} at once take {needed}",
        SHARED: f"{asked(plan)} at once would take {needed}; {count} at full length run at once, others wait",
        SHORT: f"not one sequence of {plan.fit.limits.context} tokens fits; requests longer than the cache are refused",
        NOTHING: f"before the first sequence {show_bytes(plan.least)} {of_ceiling} are needed",
    }
    return f"{plan.verdict}: {text[plan.verdict]}"


def sequence_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """(tokens, sequences at once, what they take together)."""
    return [
        (str(length), str(count), show_bytes(plan.fit.needs(count, length)) if count else "-")
        for length, count in plan.sequences
    ]


def speed_rows(prediction: Prediction) -> list[tuple[str, str]]:
    """(work, tokens a second)."""
    context = prediction.context
    decode = [(f"decode, {n} at {context} tokens", show_rate(interval)) for n, interval in prediction.decode]
    return [*decode, (f"prefill of {context} tokens", show_rate(prediction.prefill))]


def assumptions(prediction: Prediction) -> str:
    """Where the interval comes from."""
    rates, parts = prediction.rates, prediction.rates.parts
    shares = ", ".join(f"{name} {low:.0%} to {high:.0%}" for name, (low, high) in _shares(parts))
    return (
        f"from {rates.bandwidth / 1e9:.4g} GB/s and {rates.peak / 1e12:.3g} TFLOP/s ({rates.source}); reached in part: "
        f"{shares}; {parts['source']}"
    )


def _shares(parts: object) -> Iterator[tuple[str, tuple[float, float]]]:
    names = {"read": "weights read", "attention_read": "cache read", "product": "products", "attention": "attention"}
    for name, words in names.items():
        yield words, tuple(parts[name])  # type: ignore[index]
