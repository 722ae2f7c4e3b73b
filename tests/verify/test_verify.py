"""What the verifier says about programs that are wrong in one known way."""

from pathlib import Path

import msgspec
import pytest
from tests.mutants import with_rank

from pipefit.errors import InvalidProgramError, PipefitError
from pipefit.ir import Instruction, Op, Program
from pipefit.ir.text import parse_instruction
from pipefit.ir.values import Value
from pipefit.schedules import Shape, generate
from pipefit.spec.files import decode, encode
from pipefit.verify import RULES, Report, verify


def program(name="1f1b", **shape) -> Program:
    return generate(name, Shape(**{"depth": 2, "num_microbatches": 3, **shape}))


def find(p: Program, rank: int, text: str) -> int:
    return p.ranks[rank].index(parse_instruction(text))


def without(p: Program, rank: int, text: str) -> Program:
    index = find(p, rank, text)
    return with_rank(p, rank, p.ranks[rank][:index] + p.ranks[rank][index + 1 :])


def moved(p: Program, rank: int, text: str, before: str | None) -> Program:
    p = without(p, rank, text)
    index = find(p, rank, before) if before else len(p.ranks[rank])
    return with_rank(p, rank, (*p.ranks[rank][:index], parse_instruction(text), *p.ranks[rank][index:]))


def changed(p: Program, rank: int, text: str, to: str) -> Program:
    index = find(p, rank, text)
    return with_rank(p, rank, (*p.ranks[rank][:index], parse_instruction(to), *p.ranks[rank][index + 1 :]))


def swapped(p: Program, rank: int, one: str, other: str) -> Program:
    own = list(p.ranks[rank])
    i, j = find(p, rank, one), find(p, rank, other)
    own[i], own[j] = own[j], own[i]
    return with_rank(p, rank, own)


def rules(p: Program, **options) -> set[str]:
    return {violation.rule for violation in verify(p, **options).violations}


def test_a_backward_twice_is_not_complete():
    p = program()
    own = p.ranks[1]
    index = find(p, 1, "bwd s1 m0 w0")
    assert "complete" in rules(with_rank(p, 1, (*own[: index + 1], own[index], *own[index + 1 :])))


def test_a_loss_twice_is_not_complete():
    p = program()
    index = find(p, 1, "loss m0")
    assert rules(with_rank(p, 1, (*p.ranks[1][:index], p.ranks[1][index], *p.ranks[1][index:]))) == {"complete"}


def test_a_step_twice_is_not_complete():
    p = program()
    assert "complete" in rules(with_rank(p, 0, (*p.ranks[0], parse_instruction("step s0 w0"))))


def test_a_gradient_after_its_step_is_not_complete():
    assert "complete" in rules(moved(program(), 0, "bwd s0 m2 w0", None))


def test_a_gradient_before_the_step_of_the_update_before_is_not_complete():
    p = program("pipedream-2bw", num_steps=3)
    assert rules(moved(p, 1, "step s1 w0", "bwd s1 m4 w0")) == {"complete"}
    assert verify(p).ok


def test_a_missing_load_is_named_and_leaves_its_forward_without_input():
    report = verify(without(program(), 0, "load s0 m1"))
    assert {v.rule for v in report.violations} == {"complete", "dependencies"}
    assert "load s0 m1 is missing" in str(report) and "needs input[s0,1]" in str(report)


def test_a_removed_recompute_is_harmless_because_the_forward_then_saves():
    assert verify(without(program("gpipe", recompute=None), 0, "recompute s0 m1 w0")).ok


def test_a_recompute_after_its_backward_or_before_its_forward_breaks_a_dependency():
    p = program("gpipe", recompute=None)
    assert rules(moved(p, 0, "recompute s0 m1 w0", None)) >= {"dependencies"}
    assert rules(moved(p, 0, "recompute s0 m1 w0", "fwd s0 m1 w0")) == {"dependencies"}


def test_a_recompute_at_another_version_breaks_the_rule_for_versions():
    p = program("pipedream", recompute=None, num_microbatches=1, num_steps=4)
    assert "versions" in rules(changed(p, 0, "recompute s0 m1 w0", "recompute s0 m1 w1"))


def test_a_backward_must_use_the_version_of_its_forward():
    p = program("pipedream", num_microbatches=1, num_steps=4)
    report = verify(changed(p, 0, "bwd s0 m2 w1", "bwd s0 m2 w2"))
    assert any(v.rule == "versions" and "uses w2, expected w1" in v.message for v in report.violations)


def test_a_version_dropped_too_early_is_used_after_it_is_free():
    p = program("pipedream", num_microbatches=1, num_steps=4)
    assert rules(moved(p, 0, "drop s0 w0", "bwd s0 m1 w0")) == {"use-after-free", "versions"}


def test_a_version_dropped_too_late_or_never_breaks_the_rule_for_versions():
    p = program("pipedream", num_microbatches=1, num_steps=4)
    assert rules(moved(p, 0, "drop s0 w0", None)) == {"versions"}
    assert rules(without(p, 0, "drop s0 w0")) == {"versions"}


def test_the_newest_version_must_stay():
    p = program()
    assert rules(with_rank(p, 0, (*p.ranks[0], parse_instruction("drop s0 w1")))) == {"versions"}


def test_more_versions_than_allowed_are_counted():
    p = program("pipedream", depth=3, num_microbatches=1, num_steps=5)
    assert rules(p, max_versions=3) == set()
    report = verify(p, max_versions=2)
    assert {(v.rule, v.rank) for v in report.violations} == {("versions", 0)}


def test_a_wrong_peer_is_a_wrong_message():
    assert "messages" in rules(changed(program(depth=3), 0, "send s0 m0 act >1", "send s0 m0 act >2"))


def test_a_rank_cannot_send_to_itself():
    assert "messages" in rules(changed(program(), 0, "send s0 m0 act >1", "send s0 m0 act >0"))


def test_two_receives_in_another_order_than_their_sends_break_fifo():
    assert "fifo" in rules(swapped(program("gpipe"), 1, "recv s0 m0 act <0", "recv s0 m1 act <0"))


def test_sends_that_wait_for_each_other_are_printed_as_a_list():
    p = moved(program(num_microbatches=4), 1, "recv s0 m1 act <0", "fwd s1 m1 w0")
    p = moved(p, 0, "recv s0 m0 grad <1", "bwd s0 m0 w0")
    report = verify(p)
    assert {v.rule for v in report.violations} == {"deadlock"}
    (message,) = (v.message for v in report.violations)
    assert "rank 0 waits at [5] send s0 m1 act >1, for rank 1[6] recv s0 m1 act <0" in message
    assert "rank 1 waits at [5] send s0 m0 grad >0, for rank 0[6] recv s0 m0 grad <1" in message
    assert str(report) in (Path(__file__).parents[2] / "docs" / "verifier.md").read_text()


def test_a_reduction_missing_on_one_replica_is_found():
    p = program(num_microbatches=4, replicas=(2, 2))
    report = verify(without(p, 0, "reduce s0 w0 replicas"))
    assert [(v.rule, v.rank) for v in report.violations] == [("collectives", 0)]
    assert "ranks 0, 2 take part" in report.violations[0].message


def test_a_reduction_before_its_last_gradient_is_found():
    p = program(num_microbatches=4, replicas=(2, 2))
    assert "collectives" in rules(moved(p, 0, "reduce s0 w0 replicas", "bwd s0 m2 w0"))


def test_the_norm_comes_after_the_sums_it_is_of():
    p = program(ties=((0, 1),), clip=True)
    assert rules(moved(p, 0, "reduce s* w0 norm", "reduce s0 w0 tied")) >= {"collectives"}


def test_two_collectives_in_another_order_on_one_rank_deadlock():
    p = program(ties=((0, 1),), clip=True)
    p = moved(p, 0, "reduce s* w0 norm", "reduce s0 w0 tied")
    assert rules(p) == {"collectives", "deadlock"}


def test_tied_stages_on_one_rank_are_summed_too():
    p = program("interleaved", depth=1, num_chunks=2, ties=((0, 1),))
    assert parse_instruction("reduce s0 w0 tied") in p.ranks[0]
    assert rules(without(p, 0, "reduce s0 w0 tied")) == {"collectives"}


def test_an_instruction_on_another_rank_is_not_owned():
    p = program(num_microbatches=4, replicas=(2, 2))
    assert "ownership" in rules(changed(p, 0, "fwd s0 m0 w0", "fwd s0 m1 w0"))


@pytest.mark.parametrize(
    ("bad", "rule"),
    [
        ("fwd s9 m0 w0", "ownership"),
        ("fwd s0 m99 w0", "ownership"),
        ("fwd s0 m0 w77", "versions"),
        ("bwd_weight s9 m9 w9", "ownership"),
        ("step s0 w5", "complete"),
        ("step s7 w0", "ownership"),
        ("drop s0 w50", "versions"),
        ("loss m50", "ownership"),
        ("send s0 m0 weights >1", "messages"),
        ("send s0 m0 act >7", "messages"),
        ("recv s5 m0 act <1", "ownership"),
        ("gather s0 m0 saved", "messages"),
        ("reduce s0 w0 act", "collectives"),
        ("reduce s1 w0 tied", "collectives"),
        ("reduce s0 w9 replicas", "collectives"),
        ("reduce s2 w0 norm", "collectives"),
        ("fetch s0 weights w0 host @0", "residency"),
        ("evict s0 act w0 moon", "residency"),
        ("barrier", "collectives"),
    ],
)
def test_what_makes_no_sense_is_reported_at_its_place_and_never_raises(bad, rule):
    p = program()
    report = verify(with_rank(p, 0, (p.ranks[0][0], parse_instruction(bad), *p.ranks[0][1:])))
    (mine,) = (v for v in report.violations if (v.rank, v.index) == (0, 1) or rule == v.rule == "collectives")
    assert mine.rule == rule


def test_missing_and_superfluous_ranks_are_reported():
    p = program()
    assert "ownership" in rules(Program(p.header, p.ranks[:1]))
    assert rules(Program(p.header, (*p.ranks, p.ranks[0][:1]))) == {"ownership"}
    assert {v.rule for v in verify(Program(p.header, ())).violations} >= {"complete", "ownership", "messages"}


def test_places_count_in_the_program_that_was_given_even_after_nonsense():
    p = program()
    own = (Instruction(Op.FWD, 9, 9, 0), *p.ranks[0], p.ranks[0][-2])
    report = verify(with_rank(p, 0, own))
    step = next(v for v in report.violations if v.instruction.startswith("step") and v.rule == "complete")
    assert own[step.index] == own[-1] and step.index == len(own) - 1


def test_memory_over_capacity_is_refused_with_numbers_and_within_it_is_not():
    p = program("gpipe", num_microbatches=4)

    def size(value: Value) -> float:
        return 1024.0 if value.kind == "saved" else 0.0

    assert verify(p, capacity_bytes=4096, size=size).ok
    report = verify(p, capacity_bytes=[4096, 3000], size=size)
    assert [(v.rule, v.rank) for v in report.violations] == [("memory", 1)]
    assert "holds 4 KiB, capacity 2.93 KiB, 1.07 KiB too much: 4 saved 4 KiB" in report.violations[0].message
    assert report.violations[0].instruction.startswith("fwd s1 m3")


def test_a_capacity_without_sizes_or_for_other_ranks_is_a_users_mistake():
    with pytest.raises(PipefitError, match="size"):
        verify(program(), capacity_bytes=1)
    with pytest.raises(PipefitError, match="one for each of 2 ranks, got 3"):
        verify(program(), capacity_bytes=[1, 2, 3], size=lambda value: 1)


def test_a_frozen_stage_has_forwards_only():
    p = program(frozen=1, clip=True)
    assert verify(p).ok
    for text in ("bwd s0 m0 w0", "recompute s0 m0 w0", "step s0 w0"):
        report = verify(with_rank(p, 0, (*p.ranks[0], parse_instruction(text))))
        assert "complete" in {violation.rule for violation in report.violations}
    assert "stage 0 is frozen: it has forwards only" in str(verify(changed(p, 0, "fwd s0 m0 w0", "bwd s0 m0 w0")))
    assert rules(without(p, 0, "reduce s* w0 norm")) == {"collectives"}
    answered = with_rank(p, 1, (*p.ranks[1], parse_instruction("send s0 m0 grad >0")))
    assert "messages" in rules(with_rank(answered, 0, (parse_instruction("recv s0 m0 grad <1"), *p.ranks[0])))


def test_a_report_prints_the_grid_with_a_mark_and_comes_back_from_its_file_form():
    report = verify(without(program(), 0, "load s0 m1"))
    assert ">F0.1<" in str(report)
    assert "rank 1" in str(report)
    data = encode("report", report)
    assert data["format"] == "pipefit.report/1"
    assert decode("report", msgspec.json.decode(msgspec.json.encode(data)), Report, PipefitError, "here") == report
    with pytest.raises(InvalidProgramError, match="load s0 m1 is missing"):
        report.raise_if_bad()
    verify(program()).raise_if_bad()


def test_every_rule_has_one_sentence():
    assert list(RULES) == [
        *("complete", "ownership", "dependencies", "use-after-free", "messages"),
        *("fifo", "deadlock", "collectives", "versions", "residency", "sharing", "memory"),
    ]
