"""What each pass adds, and where."""

import itertools

import pytest

from pipefit.ir import COMPUTE_OPS, Op
from pipefit.ir.text import parse_instruction
from pipefit.schedules import Shape, generate


def texts(program, rank):
    return [str(i) for i in program.ranks[rank]]


def test_a_send_follows_what_it_sends():
    program = generate("gpipe", Shape(3, 4))
    for own in program.ranks:
        for before, i in itertools.pairwise(own):
            if i.op is Op.SEND:
                assert (before.mb, before.op) == (i.mb, Op.FWD if i.kind == "act" else Op.BWD)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_receive_is_posted_so_many_compute_instructions_ahead(ahead):
    program = generate("gpipe", Shape(2, 8, ahead=ahead))
    own = program.ranks[1]
    for index, i in enumerate(own):
        if i.op is Op.RECV and i.mb >= ahead:
            later = [j for j in own[index:] if j.op in COMPUTE_OPS]
            assert later[ahead].mb == i.mb


def test_receives_are_posted_in_the_order_of_their_sends_on_every_link():
    for name, shape in (("interleaved", Shape(3, 6, num_chunks=3)), ("breadth-first", Shape(2, 5, num_chunks=2))):
        program = generate(name, shape)
        for rank, own in enumerate(program.ranks):
            for peer, theirs in enumerate(program.ranks):
                sent = [(i.kind, i.stage, i.mb) for i in own if i.op is Op.SEND and i.peer == peer]
                posted = [(i.kind, i.stage, i.mb) for i in theirs if i.op is Op.RECV and i.peer == rank]
                assert sent == posted


def test_receive_buffers_of_1f1b_do_not_grow_with_the_number_of_microbatches():
    def open_at_once(program):
        most = 0
        for own in program.ranks:
            waiting = set()
            for i in own:
                if i.op is Op.RECV:
                    waiting.add((i.kind, i.stage, i.mb))
                elif i.op in COMPUTE_OPS:
                    waiting -= {("act", i.stage - 1, i.mb), ("grad", i.stage, i.mb)}
                most = max(most, len(waiting))
        return most

    assert open_at_once(generate("1f1b", Shape(4, 8))) == open_at_once(generate("1f1b", Shape(4, 64))) <= 2


def test_only_a_program_that_would_stand_still_posts_receives_earlier():
    # 1F1B with receives at their need: rank 0 would send F1 while rank 1 sends B0, each before the other's receive.
    own = texts(generate("1f1b", Shape(2, 3, ahead=0)), 1)
    assert own.index("recv s0 m1 act <0") == own.index("send s0 m0 grad >0") - 1
    late = texts(generate("naive", Shape(2, 3, ahead=0)), 0)
    assert late.index("recv s0 m1 grad <1") == late.index("bwd s0 m1 w0") - 1


def test_one_load_serves_a_model_of_one_stage():
    assert [t for t in texts(generate("naive", Shape(1, 1)), 0) if t.startswith("load")] == ["load s0 m0"]
    assert "load s1 m0" in texts(generate("naive", Shape(2, 1)), 1)


def test_a_backward_right_after_its_forward_is_not_replayed():
    gpipe = generate("gpipe", Shape(2, 3, recompute=None))
    assert (1, 2) not in gpipe.recomputed and (0, 2) not in gpipe.recomputed
    assert gpipe.recomputed == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert not {pair for pair in generate("1f1b", Shape(2, 3, recompute=None)).recomputed if pair[0] == 1}
    assert {stage for stage, _ in generate("gpipe", Shape(3, 3, recompute=(1,))).recomputed} == {1}


def test_stashing_steps_at_once_and_a_flush_at_its_end():
    eager = texts(generate("pipedream", Shape(2, 1, num_steps=3)), 1)
    assert eager.index("step s1 w0") == eager.index("bwd s1 m0 w0") + 2  # the send is between
    flush = texts(generate("gpipe", Shape(2, 2, num_steps=2)), 0)
    assert flush.index("step s0 w0") < flush.index("fwd s0 m2 w1")


def test_a_flush_steps_in_place():
    for own in generate("interleaved", Shape(2, 4, num_chunks=2, num_steps=2)).ranks:
        for before, i in itertools.pairwise(own):
            assert (i.op is Op.DROP) == (before.op is Op.STEP)


def test_replicas_sum_each_update_once_after_its_last_gradient():
    program = generate("1f1b", Shape(2, 4, num_steps=2, replicas=(2, 2)))
    for own in program.ranks:
        sums = [i for i in own if i.op is Op.REDUCE]
        assert [i.version for i in sums] == [0, 1]
        first = own.index(sums[0])
        assert {i.mb // 4 for i in own[:first] if i.op is Op.BWD} == {0}
        assert sum(i.op is Op.BWD for i in own[:first]) == 2


def test_the_norm_of_all_gradients_comes_before_the_first_step_of_every_rank():
    program = generate("interleaved", Shape(2, 4, num_chunks=2, clip=True, ties=((0, 3),)))
    for own in program.ranks:
        kinds = [i.kind if i.op is Op.REDUCE else i.op.value for i in own if i.op in (Op.REDUCE, Op.STEP)]
        assert kinds == ["tied", "norm", "step", "step"]


def test_a_tie_is_summed_when_all_backwards_of_the_update_are_done_on_the_rank():
    own = list(generate("breadth-first", Shape(2, 2, num_chunks=2, ties=((0, 3),))).ranks[1])
    assert own.index(parse_instruction("reduce s0 w0 tied")) > max(k for k, i in enumerate(own) if i.op is Op.BWD)
