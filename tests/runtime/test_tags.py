"""Tags of messages: no two that could be under way at once are equal."""

from itertools import product

from pipefit.ir.instruction import Instruction
from pipefit.ir.op import Kind, Op
from pipefit.runtime.tags import Tags


def test_all_tags_differ_and_fit_into_31_bits():
    tags = Tags(num_stages=3)
    found = [Tags.LINES]
    for stage in range(3):
        found += [tags.contract(stage), tags.contract(stage) + 1]
    for parity, batch, stage, mb, kind in product((0, 1), (0, 5), range(3), (0, 1, 255), (Kind.ACT, Kind.GRAD)):
        tags.parity = parity
        first = tags.leaf(Instruction(Op.SEND, stage, mb, kind=kind), kind, batch)
        found += range(first, first + Tags.MOST_LEAVES)
    assert len(set(found)) == len(found)
    assert 0 <= min(found) <= max(found) < 2**31


def test_a_large_model_has_tags_for_one_batch_only():
    tags = Tags(num_stages=20_000)
    last = Instruction(Op.SEND, 19_999, 255, kind=Kind.GRAD)
    tags.parity = 1
    assert tags.leaf(last, Kind.GRAD, 1) == tags.leaf(last, Kind.GRAD, 0)
    assert tags.leaf(last, Kind.GRAD, 1) + Tags.MOST_LEAVES <= tags.contract(0) < tags.contract(19_999) + 1 < Tags.LINES
