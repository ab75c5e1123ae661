"""The repairs of the interpreter themselves: without them the tests beside this one would prove little."""

from __future__ import annotations

import pytest
import torch

from tests.backends.cuda.interpreted.bench import Bench, Setup
from tests.backends.cuda.interpreted.interpreter import OutOfBounds
from tests.backends.cuda.interpreted.probes import bf16_work, copy_from


def test_u95_bfloat16_multiplies_adds_and_rounds_as_torch_does():
    a, b = torch.randn((2, 32, 32), generator=torch.Generator().manual_seed(0)).bfloat16()
    product, total, narrow = torch.empty(32, 32), torch.empty_like(a), torch.empty_like(a)
    bf16_work[(1,)](a, b, product, total, narrow, N=32)
    torch.testing.assert_close(product.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(total, a + b)
    assert torch.equal(narrow, product.bfloat16())


def causes(error):
    """An error of the interpreter and what is behind it, one for each function of the kernel that was being run."""
    while error is not None:
        yield error
        error = error.__cause__


@pytest.mark.parametrize("at", [1, -1, 10_000])
def test_a_load_outside_its_tensor_is_caught(at):
    with pytest.raises(Exception) as caught:
        copy_from[(1,)](torch.zeros(16), torch.zeros(16), at, N=16)
    assert OutOfBounds in map(type, causes(caught.value))


@pytest.mark.parametrize("block", [10_000, -1])
def test_a_block_outside_the_cache_is_caught(block):
    bench = Bench(Setup(rows=[(17, 1)]))
    bench.table[1, 1] = block
    with pytest.raises(Exception) as caught:
        bench.attend()
    assert OutOfBounds in map(type, causes(caught.value))
