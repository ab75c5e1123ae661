"""The fields of a JSON object taken one by one, strictly: nothing that could change a result is skipped.

Every field must be one of these, else `ModelError` names it:

- read by somebody;
- in `_IGNORED`: known not to change inference;
- in `_NEUTRAL`: accepted at the one value that changes nothing;
- unknown but null: it says nothing. (false, 0 and "" do say something: `"causal": false` would turn a default off.)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from pagedkv.api.errors import ModelError

_log = logging.getLogger("pagedkv.models")

LIMITS: Mapping[str, tuple[int, int]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**18),
    "intermediate_size": (1, 2**20),
    "num_hidden_layers": (1, 4096),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (2, 4096),
    "max_position_embeddings": (1, 2**24),
    "original_max_position_embeddings": (1, 2**24),
    "sliding_window": (1, 2**31 - 1),
    "max_window_layers": (0, 4096),
    "sliding_window_pattern": (1, 4096),
    "_sliding_window_pattern": (1, 4096),
    "no_rope_layer_interval": (1, 4096),
    "num_experts": (1, 4096),
    "num_local_experts": (1, 4096),
    "num_experts_per_tok": (1, 4096),
    "moe_intermediate_size": (1, 2**20),
    "decoder_sparse_step": (1, 4096),
}
"""Sizes outside these are damage or an attack, not a model. Positions are exact in float32 up to 2**24."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PROVENANCE = _words(
    "_name_or_path name_or_path transformers_version transformers.js_config model_name _commit_hash tokenizer_class "
    "unsloth_version unsloth_fixed unsloth_processed_status base_model_name_or_path language license is_llama_config"
)
_TRAINING = _words(
    "initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop dropout gradient_checkpointing "
    "pretraining_tp pad_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id"
)
_HOW_A_LIBRARY_RUNS_IT = _words(
    "use_cache torchscript use_bfloat16 _attn_implementation attn_implementation _attn_implementation_autoset "
    "_attn_implementation_internal _flash_attn_2_enabled use_flash_attn use_flash_attention use_flash_attention_2 "
    "output_attentions output_hidden_states return_dict return_dict_in_generate output_scores tf_legacy_loss "
    "cache_implementation chunk_size_feed_forward"
)
_OTHER_TASKS = _words("id2label label2id num_labels problem_type finetuning_task task_specific_params")
_SAMPLING_DEFAULTS = _words(  # which older files keep here; requests carry their own
    "max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty "
    "temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id "
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens prefix"
)
_IGNORED = _PROVENANCE | _TRAINING | _HOW_A_LIBRARY_RUNS_IT | _OTHER_TASKS | _SAMPLING_DEFAULTS

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "is_decoder": (False, True),
    "is_causal": (True,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "tie_last_hidden_states": (True, False),
    "pruned_heads": ({},),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "no_rope_layers": ([],),
    "per_layer_config": ({},),
    "use_bidirectional_attention": (False,),
}


class Fields:
    """A JSON object whose fields are taken one by one, with types; `refuse_rest` names what nobody took."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"{where} must hold a JSON object, not {show(values)}; download the model again")
        self._values = values
        self._where = where
        self._taken: set[str] = set()

    def take(self, name: str) -> Any:
        """The value, None where it is null or absent."""
        self._taken.add(name)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        return name in self._values

    def wrong(self, name: str, wanted: str) -> ModelError:
        """The error for a value that is not as it should be."""
        return ModelError(
            f"{self._where}: {name} is {show(self._values.get(name))} but must be {wanted}; "
            "correct it or download the model again"
        )

    def flag(self, name: str, default: bool) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.optional_integer(name)
        if value is None and default is None:
            raise self.wrong(name, "given: the model's shape is unknown without it")
        return self.assumed(name, default) if value is None else value

    def optional_integer(self, name: str) -> int | None:
        value = self.take(name)
        low, high = LIMITS[name]
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float, *, low: float, high: float) -> float:
        value = self.optional_number(name, low=low, high=high)
        return self.assumed(name, default) if value is None else value

    def assumed(self, name: str, value: Any) -> Any:
        """`value`, for a field that the file leaves out, with a line that says so."""
        _log.info("%s: no %s; taken as %s, like transformers", self._where, name, value)
        return value

    def optional_number(self, name: str, *, low: float, high: float) -> float | None:
        """A finite number with low < value <= high."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
            raise self.wrong(name, f"a number above {low:g} and at most {high:g}")
        return float(value)

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` finite numbers above 0."""
        value = self.take(name)
        if not isinstance(value, list) or len(value) != count or not all(map(_positive, value)):
            raise self.wrong(name, f"a list of {count} numbers above 0 (half of the turned entries of a head)")
        return tuple(map(float, value))

    def ignore(self, names: Iterable[str]) -> None:
        """Fields that change nothing for this kind of model."""
        self._taken.update(names)

    def refuse_rest(self) -> None:
        """Raise for every field that was not taken and could change a result."""
        rest = [
            f"{name} = {show(value)}"
            for name, value in self._values.items()
            if name not in self._taken and not _changes_nothing(name, value)
        ]
        if rest:
            raise ModelError(
                f"{self._where} has fields that pagedkv does not know, so it could compute something else than the "
                f"model means: {'; '.join(rest)}. If a field does not change inference, remove it from the file; "
                "otherwise this model needs a newer pagedkv"
            )


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _changes_nothing(name: str, value: Any) -> bool:
    if value is None or name in _IGNORED:
        return True
    return any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL.get(name, ()))


def show(value: Any, limit: int = 80) -> str:
    """A value for a message, cut so that a hostile file cannot flood the terminal."""
    text = ascii(value)
    return text if len(text) <= limit else text[:limit] + "..."
