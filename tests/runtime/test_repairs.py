"""The protocol of a repair, with threads in place of ranks: a commit is passed by all that are left, or by none."""

import threading
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import pytest
import torch

from pipefit.errors import CommunicationError, PipefitError
from pipefit.parallel import waiting
from pipefit.runtime import notes
from pipefit.runtime import repairs as module
from pipefit.runtime.faults import noted
from pipefit.runtime.progress import Progress
from pipefit.runtime.repairs import CAN, CANNOT, REPAIR, WORDS, InterruptedUnitError, Loss, Repairs
from pipefit.runtime.session import Session
from pipefit.runtime.survivors import Survivors


@pytest.fixture(autouse=True)
def _own_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks set it for their process, which is this one here."""
    monkeypatch.setattr(waiting, "can_leave", False)


class Ranks:
    """Three ranks, of which the last one dies; the launcher's side is in the test."""

    def __init__(self, place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(notes, "shut_down", lambda before: None)
        ends = [Pipe() for _ in range(3)]
        self.pipes = [ours for ours, _ in ends]
        self.mended: list[Loss] = []
        self.own = [Repairs(theirs, 0, Progress()) for _, theirs in ends]
        for one in self.own:
            one.check = lambda loss: None
            one.mend = self.mended.append
        self.survivors = Survivors([None] * 3, self.pipes, place, 0, 2, 60.0)
        self.ended = threading.Event()

    def run(self, *works: Callable[[], Any]) -> list[Any]:
        """Loses the last rank while the others work; returns their results or errors."""
        results: list[Any] = [None] * len(works)

        def act(rank: int) -> None:
            self.own[rank].listen()
            try:
                results[rank] = works[rank]()
            except (PipefitError, RuntimeError, InterruptedUnitError) as problem:
                results[rank] = problem

        threads = [threading.Thread(target=act, args=(rank,)) for rank in range(len(works))]
        for thread in threads:
            thread.start()
        heard = dict.fromkeys(range(len(works)))
        while any(thread.is_alive() for thread in threads):
            for rank in heard:
                while self.pipes[rank].poll(0.01):
                    word, what = self.pipes[rank].recv()
                    assert word in WORDS
                    self.survivors.hears(rank, word, what)
                    heard[rank] = heard[rank] or word
            if all(heard.values()) and not self.survivors.lost and self.survivors.faults == 0:
                self.survivors.lose({2: ("died", -9)}, ["rank 2 died"], set())
        return results


def broken() -> None:
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1")


def once_broken(result: str) -> Callable[[], str]:
    """A unit that is interrupted the first time."""
    left = [broken]

    def work() -> str:
        while left:
            left.pop()()
        return result

    return work


def test_a_rank_that_is_behind_takes_the_sum_of_one_that_has_passed(tmp_path, monkeypatch):
    ranks = Ranks(tmp_path, monkeypatch)
    ahead, behind = ranks.own[:2]

    def passes() -> str:
        ahead.commit(lambda: None, torch.tensor([3.0, 4.0]))
        return ahead.repeated(once_broken("the next unit, again"))

    def waits() -> list[float]:
        total = torch.zeros(2)
        behind.repeated(lambda: behind.commit(broken, total))
        return total.tolist()

    assert ranks.run(passes, waits) == ["the next unit, again", [3.0, 4.0]]
    assert [loss.lost for loss in ranks.mended] == [[2], [2]] and ranks.mended[0].left == [0, 1]
    assert (ahead.faults, behind.faults) == (1, 1)
    assert [line["fault"] for line in noted(tmp_path)] == ["rank 2 died"]


def test_a_commit_that_nobody_has_passed_is_repeated_by_all(tmp_path, monkeypatch):
    ranks = Ranks(tmp_path, monkeypatch)
    begun: list[int] = []

    def unit(rank: int) -> Callable[[], None]:
        waits = [broken, lambda: None]

        def work() -> None:
            begun.append(rank)
            ranks.own[rank].commit(waits.pop(0), torch.zeros(1))

        return lambda: ranks.own[rank].repeated(work)

    assert ranks.run(unit(0), unit(1)) == [None, None]
    assert sorted(begun) == [0, 0, 1, 1] and len(ranks.mended) == 2


def test_a_rank_that_refuses_ends_the_repair_for_all(tmp_path, monkeypatch):
    ranks = Ranks(tmp_path, monkeypatch)

    def refuses(loss: Loss) -> None:
        raise PipefitError("no copy of stage 1 is left")

    ranks.own[1].check = refuses
    found = ranks.run(*(lambda own=own: own.repeated(broken) for own in ranks.own[:2]))
    assert all("Connection closed by peer" in str(one) for one in found)
    assert ranks.survivors.why_not == ["rank 1: no copy of stage 1 is left"] and not ranks.mended


def test_an_iterator_that_is_used_up_is_not_read_again(tmp_path, monkeypatch):
    ranks = Ranks(tmp_path, monkeypatch)
    own = ranks.own[0]

    def unit() -> None:
        with own.inside():
            own.only_once = "its batches are an iterator"
            broken()

    ranks.run(lambda: own.repeated(unit), lambda: ranks.own[1].repeated(broken))
    assert ranks.survivors.why_not == ["rank 0: its batches are an iterator"]


def test_a_unit_that_can_be_repeated_follows_one_that_cannot(tmp_path, monkeypatch):
    ranks = Ranks(tmp_path, monkeypatch)
    own = ranks.own[0]

    def once() -> None:
        with own.inside():
            own.only_once = "its batches are an iterator"

    def both() -> str:
        own.repeated(once)
        return own.repeated(once_broken("a step"))

    assert ranks.run(both, lambda: ranks.own[1].repeated(once_broken("a step"))) == ["a step"] * 2


def test_an_error_of_other_code_is_no_loss(tmp_path, monkeypatch):
    own = Ranks(tmp_path, monkeypatch).own[0]
    own.listen()

    def fails() -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        own.repeated(fails)


def test_after_a_loss_any_error_may_come_from_numbers_that_a_gpu_has_not_received(tmp_path, monkeypatch):
    ranks = Ranks(tmp_path, monkeypatch)
    own = ranks.own[0]
    left = [IndexError("target 99 is out of bounds")]

    def step() -> str:
        while left:
            own.await_word()
            raise left.pop()
        return "again"

    assert ranks.run(lambda: own.repeated(step), lambda: ranks.own[1].repeated(once_broken(""))) == ["again", ""]


def test_an_error_after_the_commit_is_no_part_of_a_loss(tmp_path, monkeypatch):
    """Others have made the step: a repetition would be one too many."""
    ranks = Ranks(tmp_path, monkeypatch)
    own = ranks.own[0]

    def step() -> None:
        own.commit(lambda: None, torch.zeros(1))
        own.await_word()
        raise PipefitError("a gradient is not finite")

    found = ranks.run(lambda: own.repeated(step), lambda: None)
    assert str(found[0]) == "a gradient is not finite" and own.commits == 1


def test_no_sum_that_is_a_commit_begins_after_a_loss(tmp_path, monkeypatch):
    """A GPU goes on with numbers that it has not received; the others must not take them for its own."""
    ranks = Ranks(tmp_path, monkeypatch)
    own = ranks.own[0]
    begun: list[int] = []

    def step() -> None:
        if not own.losses:
            own.await_word()
        own.check_none_is_lost()
        begun.append(len(own.losses))

    ranks.run(lambda: own.repeated(step), lambda: ranks.own[1].repeated(once_broken("")))
    assert begun == [1]


def test_a_hang_without_a_known_cause_is_that_of_a_rank_which_another_one_reports(tmp_path, monkeypatch):
    """A rank that is being ended is in no state of a process that is stopped or has ended."""
    ranks = Ranks(tmp_path, monkeypatch)
    found = ranks.run(lambda: ranks.own[0].hung(None, 0, "a cycle"), lambda: None)
    assert found[0] is True
    monkeypatch.setattr(module, "_WORD_S", 0.01)
    alone = Ranks(tmp_path, monkeypatch).own[0]
    assert not alone.hung(None, 0, "a cycle")
    alone.listen()
    assert not alone.hung(None, 0, "a cycle")


def test_a_hang_while_the_others_meet_again_is_no_part_of_the_loss_before(tmp_path, monkeypatch):
    """The watchdogs once left it to the repair that was under way, which waited for ever."""
    ranks = Ranks(tmp_path, monkeypatch)
    own = ranks.own[0]
    found: list[bool] = []

    def mend(loss: Loss) -> None:
        monkeypatch.setattr(module, "_WORD_S", 0.01)
        found.append(own.hung(None, own.faults, "a cycle"))
        found.append(own.hung(None, own.faults - 1, "a cycle of the ranks before"))

    own.mend = mend
    ranks.run(lambda: own.repeated(once_broken("")), lambda: ranks.own[1].repeated(once_broken("")))
    assert found == [False, True]


def test_a_rank_that_loses_another_one_between_two_steps_says_so_to_the_launcher():
    ours, theirs = Pipe()
    own = Repairs(theirs, 0, Progress())
    own.listen()
    session = Session(0, 2, None, Progress(), repairs=own)
    with pytest.raises(CommunicationError), session.sharing_errors(lambda: "Pipeline.fit()"):
        raise RuntimeError("Connection closed by peer")
    said = [ours.recv(), ours.recv()]
    assert said == [(CAN, ""), (CANNOT, "it was in Pipeline.fit()")]


def test_a_rank_that_loses_another_one_while_all_meet_again_lets_the_launcher_name_the_cause(tmp_path, monkeypatch):
    """Its own word once came before the launcher had seen the death: the loss before seemed beyond repair."""
    ranks = Ranks(tmp_path, monkeypatch)
    own = ranks.own[0]

    def mend(loss: Loss) -> None:
        timer = threading.Timer(0.3, lambda: ranks.survivors.lose({1: ("died", -9)}, ["rank 1 died"], set()))
        timer.start()
        broken()

    own.mend = mend
    session = Session(0, 2, None, Progress(), repairs=own)

    def works() -> None:
        with session.sharing_errors(lambda: "Pipeline.fit()"):
            own.repeated(once_broken(""))

    found = ranks.run(works, lambda: ranks.own[1].repeated(once_broken("")))
    assert isinstance(found[0], CommunicationError)
    assert ranks.survivors.why_not == ["a rank was lost while the others met again"]
    assert ranks.survivors.faults == 1 and not ranks.survivors.undone


def test_a_run_that_may_not_be_repaired_says_so(tmp_path, monkeypatch):
    """The reason was that the training had not begun, after any step."""
    monkeypatch.setenv(REPAIR, "0")
    survivors = Survivors([None] * 2, Pipe(), tmp_path, 0, 2, 60.0)
    assert not survivors.lose({1: ("died", -9)}, ["rank 1 died"], set())
    assert survivors.why_not == ["PIPEFIT_REPAIR is 0"]
