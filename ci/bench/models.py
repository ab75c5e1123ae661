"""The model of a comparison in the forms that the engines read, each written once under .peers/models.

llama.cpp and OpenVINO read the GGUF file itself. transformers and vLLM read a folder in Hugging Face layout, for which
pagedkv's reader dequantizes the file. `llama-1b-random` (weights Q4_0, or with ":Q8_0" behind the name) is a second
shape, that of Llama-3.2-1B, made up here: what it says makes no sense, what it costs does. Its rotation has no scaling
for long contexts, and its words are those of the demo model's vocabulary.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from pagedkv.models.checkpoint import open_checkpoint
from pagedkv.models.gguf import GgufFile

_log = logging.getLogger("bench")

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / ".peers" / "models"
RANDOM = "llama-1b-random"
Sizes = Mapping[str, int | float]

LLAMA_1B: Sizes = {
    "block_count": 16,
    "context_length": 131072,
    "embedding_length": 2048,
    "feed_forward_length": 8192,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
    "rope.dimension_count": 64,
    "vocab_size": 128256,
}
"""Under GGUF's names. The head is the embedding table. Source: config.json of meta-llama/Llama-3.2-1B."""

SCALE = 0.02
"""The deviation of random weights."""
DEVIATIONS = {"Q4_0": 4.61, "Q8_0": 73.9}
"""Of the random codes themselves: uniform over 16 and over 256 values, sqrt((n^2 - 1) / 12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`path`: its GGUF file, or its folder. `cache_numbers`: the keys and values of one token in all layers."""

    name: str
    path: Path
    is_gguf: bool
    vocab_size: int
    max_tokens: int
    cache_numbers: int

    def folder_in(self, dtype: str) -> Path:
        """The folder in Hugging Face layout, made from the file if need be."""
        if not self.is_gguf:
            return self.path
        folder = STORE / f"{self.path.stem}-{dtype}"
        if not folder.exists():
            _log.info("writing %s", folder)
            _whole(folder, lambda to: _write_folder(self.path, dtype, to))
        return folder


def find(name: str) -> Model:
    """The model by a name that pagedkv knows, or the made-up one. Raises pagedkv's errors for what it does not know."""
    kind, _, weights = name.partition(":")
    known = str(random_llama(weights or "Q4_0")) if kind == RANDOM else name
    checkpoint = open_checkpoint(known, model_impl="native")
    try:
        config = checkpoint.config
        return Model(
            name=known,
            path=Path(checkpoint.path),
            is_gguf=checkpoint.format == "gguf",
            vocab_size=config.vocab_size,
            max_tokens=config.max_position,
            cache_numbers=sum(layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in config.layer_specs()),
        )
    finally:
        checkpoint.close()


def _whole(target: Path, write: Callable[[Path], None]) -> None:
    """Write under another name first: what was interrupted is never taken for a model."""
    unfinished = target.with_name(f"{target.name}.new")
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    write(unfinished)
    unfinished.rename(target)


def _write_folder(path: Path, dtype: str, to: Path) -> None:
    """The GGUF file as safetensors, dequantized."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(str(path))
    number = getattr(torch, dtype)
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=number)
    weights = {name: checkpoint.tensor(name, number) for name in checkpoint.names()}
    checkpoint.close()
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise click.ClickException(f"{path} is no model of transformers: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    model.save_pretrained(to)


def tokenizer_in(model: Model) -> Path:
    """A folder with the model's tokenizer in Hugging Face layout, for a server that reads the folder of `folder_in`."""
    if not model.is_gguf:
        return model.path
    folder = STORE / f"{model.path.stem}-tokenizer"
    if not folder.exists():
        _log.info("writing %s", folder)
        _whole(folder, lambda to: _write_tokenizer(model.path, to))
    return folder


def _write_tokenizer(path: Path, to: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(to)
    AutoConfig.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(to)  # says whose tokenizer it is


def random_llama(weights: str) -> Path:
    """A GGUF file of Llama-3.2-1B's shape, all matrices Q4_0 or Q8_0, written on the first call."""
    if weights not in DEVIATIONS:
        raise click.ClickException(f"{RANDOM}:{weights} is not known; the weights are {' or '.join(DEVIATIONS)}")
    path = STORE / f"{RANDOM}-{weights}.gguf"
    if not path.exists():
        _log.info("writing %s", path)
        _whole(path, lambda to: write_random(to, LLAMA_1B, weights, demo_vocabulary(int(LLAMA_1B["vocab_size"]))))
    return path


def write_random(path: Path, sizes: Sizes, weights: str, words: Vocabulary) -> None:
    """A file of architecture "llama" with these sizes, the same in every run; matrices of type `weights`."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama", use_temp_file=True)
    kind = gguf.GGMLQuantizationType[weights]
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{weights}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, value in sizes.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_float32)(f"llama.{name}", value)
    _add_vocabulary(writer, words)
    rng = np.random.default_rng(0)
    for name, rows, columns in _matrices(sizes):
        writer.add_tensor(name, _random_blocks(rng, rows, columns, weights), raw_dtype=kind)
    for name in _norms(sizes):
        writer.add_tensor(name, np.ones(int(sizes["embedding_length"]), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _matrices(sizes: Sizes) -> Iterator[tuple[str, int, int]]:
    """(name, rows, columns) of every matrix."""
    hidden, inner = int(sizes["embedding_length"]), int(sizes["feed_forward_length"])
    kv = hidden * int(sizes["attention.head_count_kv"]) // int(sizes["attention.head_count"])
    yield "token_embd.weight", int(sizes["vocab_size"]), hidden
    shapes = {
        "attn_q": (hidden, hidden),
        "attn_k": (kv, hidden),
        "attn_v": (kv, hidden),
        "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    for index in range(int(sizes["block_count"])):
        yield from ((f"blk.{index}.{name}.weight", *shape) for name, shape in shapes.items())


def _norms(sizes: Sizes) -> Iterator[str]:
    yield "output_norm.weight"
    for index in range(int(sizes["block_count"])):
        yield from (f"blk.{index}.{name}.weight" for name in ("attn_norm", "ffn_norm"))


def _random_blocks(rng: np.random.Generator, rows: int, columns: int, weights: str) -> np.ndarray:
    """Rows of blocks of 32 weights: one scale as fp16, then random codes. uint8 [rows, bytes of a row]."""
    codes = {"Q4_0": 16, "Q8_0": 32}[weights]
    blocks = np.empty((rows, columns // 32, 2 + codes), np.uint8)
    blocks[:, :, :2] = np.frombuffer(np.float16(SCALE / DEVIATIONS[weights]).tobytes(), np.uint8)
    blocks[:, :, 2:] = np.frombuffer(rng.bytes(rows * columns // 32 * codes), np.uint8).reshape(rows, -1, codes)
    return blocks.reshape(rows, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What a GGUF file says of a byte-level tokenizer. `types`: 1 a word, 3 control, 5 unused."""

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    end: int


def demo_vocabulary(size: int) -> Vocabulary:
    """The demo model's words, then unused ones up to `size`."""
    demo = open_checkpoint("demo")
    demo.close()
    file = GgufFile(Path(demo.path))
    words, types, merges = (list(file.array(f"tokenizer.ggml.{name}")) for name in ("tokens", "token_type", "merges"))
    pre, end = (file.metadata[f"tokenizer.ggml.{name}"] for name in ("pre", "eos_token_id"))
    file.close()
    unused = [f"<|unused_{number}|>" for number in range(len(words), size)]
    return Vocabulary(
        pre=pre,
        tokens=[*map(str, words), *unused],
        types=[*map(int, types), *[5] * len(unused)],
        merges=list(map(str, merges)),
        end=end,
    )


def _add_vocabulary(writer: Any, words: Vocabulary) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words.pre)
    writer.add_token_list(words.tokens)
    writer.add_token_types(words.types)
    writer.add_token_merges(words.merges)
    writer.add_bos_token_id(words.end)
    writer.add_eos_token_id(words.end)
    writer.add_add_bos_token(False)
