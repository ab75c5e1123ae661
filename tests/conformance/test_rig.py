"""The kit's small core: sequences that share, move and are given content, and comparisons to the last bit."""

import numpy as np
import pytest
import torch

from pagedkv.conformance.kit import Kit, assert_same_bits
from pagedkv.conformance.subject import Subject


@pytest.fixture(scope="module")
def subject():
    made = Subject("cpu", options={"threads": 1})
    yield made
    made.close()


@pytest.fixture
def kit(subject):
    made = Kit(subject, lambda name, value: None)
    yield made
    made.close()


def test_a_fork_starts_with_its_parents_tokens_and_whole_blocks(kit):
    rig = kit.rig()
    size, layer = rig.block_size, rig.layer()
    parent = rig.sequence(2 * size + 1)
    child = rig.fork(parent, size + 1, 3 * size)
    for own, other in zip(child.qkv(layer), parent.qkv(layer), strict=True):
        assert torch.equal(own[: size + 1], other[: size + 1])
        assert not torch.equal(own[size + 1], other[size + 1])
    assert child.blocks[0] == parent.blocks[0]
    assert len(child.blocks) == 3 and set(child.blocks[1:]).isdisjoint(parent.blocks)


def test_moved_content_is_the_same_and_given_content_is_the_sequences_own(kit):
    rig = kit.rig()
    layer, seq = rig.layer(), rig.sequence(3)
    other = seq.moved([7])
    assert torch.equal(other.qkv(layer)[1], seq.qkv(layer)[1]) and other.blocks == [7]
    before = seq.qkv(layer)[1].clone()
    other.give(layer, *(torch.zeros_like(tensor) for tensor in seq.qkv(layer)))
    assert torch.equal(seq.qkv(layer)[1], before) and not other.qkv(layer)[1].any()


def test_views_of_two_groups_take_blocks_from_one_list(kit):
    rig = kit.rig(groups=[kit.spec(kit.layer(i)).groups[0] for i in (0, 1)])
    other = rig.of_group(1)
    taken = rig.sequence(1).blocks + other.sequence(1).blocks
    assert len(set(taken)) == 2 and set(taken).isdisjoint(rig.free) and other.free is rig.free
    assert [view.layer().index for view in (rig, other)] == [0, 1]


def test_the_same_bits_are_the_same_to_the_last(kit):
    values = np.array([1.0, np.nan, 0.1])
    assert_same_bits(values, values.copy())
    with pytest.raises(AssertionError, match=r"1 of 3 values differ at \(2,\): a likely mistake"):
        assert_same_bits([1.0, 0.0, np.nextafter(0.1, 1)], [1.0, 0.0, 0.1], "a likely mistake")
    with pytest.raises(AssertionError, match="shape"):
        assert_same_bits(values, values[:2])


def test_a_copy_written_through_the_rig_reads_as_the_oracle_says(kit):
    rig = kit.rig()
    seq = rig.sequence(rig.block_size)
    rig.write(seq, 0, seq.length)
    other = seq.moved(rig.sequence(seq.length).blocks)
    rig.backend.wait(rig.copy([(seq.blocks[0], other.blocks[0])]))
    kit.check(rig, rig.read(other), rig.expected((seq, seq.length, seq.length)))
    rig.clear(other.blocks)
    assert not rig.read(other).any()
