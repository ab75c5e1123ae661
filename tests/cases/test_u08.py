"""U08: two different blocks never share keys and values.

The row allows a collision-resistant hash over parent and tokens, or a comparison of tokens on a hit. The index takes
the first: equal hashes are equal content, so a hash replaced by one of four values must fail and proves nothing. What
is tested instead is what collision resistance stands on: 256 bits, chained, keyed by a secret, bound to model and
tenant, and another value for any change of what goes in.
"""

from __future__ import annotations

import itertools
from hashlib import blake2b

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.core.prefix_index import DIGEST, PrefixIndex
from tests.helpers.engine_rig import engine, greedy, solo, some_prompts, token_ids

IDS = st.lists(st.integers(0, 3) | st.integers(0, 2**31 - 1), min_size=1, max_size=24)
KEY = bytes(range(32))


def chain(index: PrefixIndex, ids: list[int], size: int, salt: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    index.extend(hashes, index.root(salt), np.array(ids, np.int32).tobytes(), 4 * size)
    return hashes


@settings(max_examples=300, deadline=None)
@given(IDS, IDS, st.integers(1, 4), st.binary(max_size=9), st.binary(max_size=9))
def test_u08_equal_hashes_mean_equal_tokens_from_the_start_and_an_equal_salt(a, b, size, salt_a, salt_b):
    index = PrefixIndex(b"model", KEY)
    first, second = chain(index, a, size, salt_a), chain(index, b, size, salt_b)
    for (i, x), (j, y) in itertools.product(enumerate(first), enumerate(second)):
        same = salt_a == salt_b and i == j and a[: (i + 1) * size] == b[: (j + 1) * size]
        assert (x == y) == same


def test_u08_a_hash_has_256_bits_and_is_blake2b_over_parent_and_tokens():
    index = PrefixIndex(b"model", KEY)
    ids = np.arange(8, dtype=np.int32)
    first, second = chain(index, ids.tolist(), 4)
    assert DIGEST * 8 == len(first) * 8 == 256
    assert second == blake2b(first + ids[4:].tobytes(), digest_size=32).digest()
    assert index.root(b"ab") == blake2b(b"model" + (2).to_bytes(8, "little") + b"ab", digest_size=32, key=KEY).digest()


def test_u08_nobody_outside_can_compute_a_hash():
    same = [chain(PrefixIndex(b"model"), [1, 2, 3, 4], 4)[0] for _ in range(8)]
    assert len(set(same)) == 8, "each engine has a secret key of its own"
    assert chain(PrefixIndex(b"other", KEY), [1, 2], 2) != chain(PrefixIndex(b"model", KEY), [1, 2], 2)


def test_u08_fifty_thousand_blocks_have_as_many_hashes():
    index = PrefixIndex(b"model", KEY)
    hashes = {h for start in range(50) for h in chain(index, list(range(start, start + 1000)), 1)}
    assert len(hashes) == 50_000
    bits = np.unpackbits(np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32), axis=1).mean(0)
    assert abs(bits - 0.5).max() < 0.02, "every bit is used: 9 standard deviations of a fair coin"


def test_u08_thirty_prompts_of_few_letters_equal_the_oracle():
    prompts = [[1 + i % 2 for i in map(int, f"{n:b}")] + p for n, p in enumerate(some_prompts([6] * 30))]
    with engine(block_size=1, num_blocks=200) as llm:
        outputs = llm.generate(prompts, greedy(4), use_tqdm=False)
        assert token_ids(outputs) == [solo(p, greedy(4)) for p in prompts]
