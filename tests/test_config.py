"""Settings: today's names, old ones, unbuilt ones, wrong ones, and sizes in bytes."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from pagedkv.config import KV_DTYPES, EngineConfig, claim_options, parse_bytes, show_bytes
from pagedkv.errors import ConfigError

ACCEPTED = {"threads": "threads", "num_threads": "threads"}


def config(**names: Any) -> EngineConfig:
    return EngineConfig.of(**{"model": "somewhere"} | names)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 * 2**30),
        ("512 MiB", 2**29),
        ("2GB", 2 * 10**9),
        ("1.5KiB", 1536),
        ("7", 7),
        ("7B", 7),
        (4096, 4096),
        (" 1TiB ", 2**40),
    ],
)
def test_sizes_in_bytes(text: Any, size: int) -> None:
    assert parse_bytes(text, "kv_cache_memory") == size
    assert config(kv_cache_memory=text).kv_cache_bytes == size


@pytest.mark.parametrize("text", ["banana", "4gib", "-1", "", "1e9", "4 Gi B", "nan", 0, -5, "0", 1.5, True, [], "inf"])
def test_a_size_that_is_none_is_refused_at_once(text: Any) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory="):
        config(kv_cache_memory=text)


def test_bytes_for_people() -> None:
    assert [show_bytes(n) for n in (None, 0, 1023, 1536, 2**20, 5 * 2**30, -(2**21))] == [
        "unknown",
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "5.0 GiB",
        "-2.0 MiB",
    ]


ABSURD: list[tuple[str, Any]] = [
    (name, value)
    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size")
    for value in (0, -1, 1.5, "8", True)
] + [
    ("num_blocks", 1),
    ("num_blocks", 2.0),
    ("device", -1),
    ("max_overtakes", -1),
    ("seed", "3"),
    ("seed", 0.5),
    ("gpu_memory_utilization", 0),
    ("gpu_memory_utilization", 1.01),
    ("gpu_memory_utilization", float("nan")),
    ("gpu_memory_utilization", "half"),
    ("gpu_memory_utilization", True),
    ("dtype", "float8"),
    ("dtype", ["float32"]),
    ("dtype", None),
    ("dtype", "fp8"),
    ("kv_cache_dtype", "fp4"),
    ("load_format", "pickle"),
    ("load_format", ["auto"]),
    ("model", ""),
    ("model", None),
    ("model", 7),
    ("tokenizer", 7),
    ("revision", 7),
    ("backend", 7),
    ("enable_prefix_caching", "false"),
    ("enable_chunked_prefill", 0),
    ("skip_tokenizer_init", None),
    ("batch_invariant", "yes"),
    ("backend_options", "threads=1"),
    ("backend_options", 5),
    ("backend_options", ["threads"]),
]


@pytest.mark.parametrize(("name", "value"), ABSURD, ids=lambda v: repr(v))
def test_an_absurd_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        config(**{name: value})


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("int8", "int8/token_head"),
        ("fp8", "fp8_e4m3fn/tensor"),
        ("fp8_e4m3", "fp8_e4m3fn/tensor"),
        ("fp8_e5m2", "fp8_e5m2/tensor"),
        ("fp8_e5m2/tensor", "fp8_e5m2/tensor"),
        ("half", "fp16"),
        ("auto", None),
    ],
)
def test_names_of_cache_dtypes(given: str, word: str | None) -> None:
    assert KV_DTYPES[config(kv_cache_dtype=given).kv_cache_dtype] == word


def test_every_problem_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        config(max_num_seqs=0, dtype="float8", kv_cache_memory="banana", enable_prefix_caching="no")
    for name in ("max_num_seqs=0", "dtype='float8'", "kv_cache_memory='banana'", "enable_prefix_caching='no'"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"kv_cache_memory": "1GiB", "num_blocks": 9}, "kv_cache_memory and num_blocks both size the cache"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "max_num_batched_tokens=8 is below max_num_seqs=9"),
        ({"num_blocks": 9, "num_gpu_blocks_override": 8}, "num_blocks is given twice"),
        ({"kv_cache_memory_bytes": 9, "kv_cache_memory": 8}, "kv_cache_memory is given twice"),
    ],
)
def test_settings_that_contradict_each_other(names: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config(**names)


@pytest.mark.parametrize(
    ("old", "value", "text"),
    [
        ("worker_use_ray", False, 'worker_use_ray is now called distributed_executor_backend="ray"'),
        ("max_context_len_to_capture", 8192, "max_context_len_to_capture is now called max_seq_len_to_capture"),
        ("kv_cache_memory_bytes", 2**20, "kv_cache_memory_bytes is now called kv_cache_memory"),
        ("num_gpu_blocks_override", 100, "num_gpu_blocks_override is now called num_blocks"),
        ("max_parallel_loading_workers", 4, "max_parallel_loading_workers=4 has no effect"),
        ("disable_custom_all_reduce", True, "disable_custom_all_reduce=True has no effect"),
        ("distributed_executor_backend", "mp", "distributed_executor_backend='mp' has no effect"),
    ],
)
def test_old_names_and_names_without_effect_get_a_line(
    old: str, value: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagedkv")
    made = config(**{old: value})
    assert text in caplog.text
    assert made.backend_options == {}
    if old == "num_gpu_blocks_override":
        assert made.num_blocks == 100
    if old == "kv_cache_memory_bytes":
        assert made.kv_cache_bytes == 2**20


@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("tensor_parallel_size", 2, 1),
        ("pipeline_parallel_size", 2, 1),
        ("quantization", "awq", None),
        ("trust_remote_code", True, False),
        ("speculative_config", {"model": "x"}, None),
        ("enable_lora", True, False),
        ("kv_tiers", ["redis"], ()),
        ("worker_use_ray", True, False),
        ("distributed_executor_backend", "ray", None),
    ],
)
def test_what_is_not_built_is_refused_and_its_neutral_value_accepted(name: str, value: Any, neutral: Any) -> None:
    with pytest.raises(ConfigError, match="is not built yet"):
        config(**{name: value})
    assert config(**{name: neutral}) == config()


@pytest.mark.parametrize("value", [None, "gguf", "none"])
def test_quantization_is_one_that_is_known(value: str | None) -> None:
    assert config(quantization=value).quantization == value
    with pytest.raises(
        ConfigError, match="quantization='int8' is not built yet: only gguf and none are known; leave it"
    ):
        config(quantization="int8")


def test_the_backends_options_may_stand_beside_the_engines_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pagedkv")
    assert claim_options(config(threads=3), ACCEPTED, "cpu") == {"threads": 3}
    assert "threads is an option of backend cpu" in caplog.text
    assert claim_options(config(num_threads=2), ACCEPTED, "cpu") == {"threads": 2}
    assert claim_options(config(backend_options={"threads": 4}), ACCEPTED, "cpu") == {"threads": 4}


def test_one_option_in_two_places_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads"):
        claim_options(config(threads=3, backend_options={"threads": 4}), ACCEPTED, "cpu")
    with pytest.raises(ConfigError, match="threads"):
        claim_options(config(threads=3, num_threads=4), ACCEPTED, "cpu")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_model_length", "did you mean max_model_len?"),
        ("gpu_memory_utilisation", "did you mean gpu_memory_utilization?"),
        ("tensor_parallel", "did you mean tensor_parallel_size?"),
        ("thread", "did you mean threads?"),
        ("zzzzzzzz", "known names are"),
    ],
)
def test_an_unknown_name_gets_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is neither a setting of the engine nor an option of backend cpu"):
        claim_options(config(**{name: 1}), ACCEPTED, "cpu")
    try:
        claim_options(config(**{name: 1}), ACCEPTED, "cpu")
    except ConfigError as error:
        assert hint in str(error)


def test_paths_are_taken_as_text() -> None:
    made = config(model=Path("a") / "b", tokenizer=Path("c"))
    assert (made.model, made.tokenizer) == (str(Path("a") / "b"), "c")


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [("4GiB", 4 << 30), (4, 4 << 30), (0.5, 1 << 29), ("2", 2 << 30), ("512 MiB", 1 << 29), (0, 0), ("0", 0)],
)
def test_swap_space_is_a_size_and_a_plain_number_is_gib(given: Any, nbytes: int) -> None:
    assert EngineConfig.of(model="m", swap_space=given).swap_bytes == nbytes


@pytest.mark.parametrize("unset", [None, "auto"])
def test_swap_space_may_be_left_to_the_engine(unset: Any) -> None:
    assert EngineConfig.of(model="m", swap_space=unset).swap_bytes is None


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"swap_space": -1}, "swap_space=-1 must be GiB"),
        ({"swap_space": True}, "swap_space=True must be GiB"),
        ({"swap_space": "lots"}, "swap_space='lots' is not a size: give GiB as a plain number"),
        ({"swap_space": [1]}, "must be GiB"),
        ({"swap_space": 1, "swap_blocks": 3}, "give one of them"),
        ({"swap_blocks": -1}, "swap_blocks=-1"),
        ({"preemption_mode": "drop"}, "not one of auto, swap, recompute"),
        ({"max_preemptions": 0}, "max_preemptions=0"),
        ({"prefill_rate": 0}, "prefill_rate=0 must be tokens a second"),
        ({"copy_bandwidth": "fast"}, "copy_bandwidth='fast' is not a size"),
        ({"enable_host_caching": 1}, "enable_host_caching=1 must be True or False"),
    ],
)
def test_bad_settings_of_swap_are_refused_by_name(names: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        EngineConfig.of(model="m", **names)
