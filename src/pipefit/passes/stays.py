"""Stages in slots, from load to eviction: visits are known in advance, and the number of loads is minimal."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from pipefit.errors import ScheduleError
from pipefit.ir.instruction import Indices, Instruction, Instructions, StageAt
from pipefit.ir.op import Op

_NEVER = 1 << 60

Visit = tuple[int, Indices]
"""The index of an instruction, and the stages that it uses."""


@dataclass(eq=False)
class Stay:
    """A stage in a slot, from one load to the next eviction.

    Attributes:
        stage: the stage.
        slot: its slot.
        before: the stay that leaves the slot for it (None: the slot was never used).
        visits: the instructions of the rank that use it meanwhile.
        start: the index of the instruction before which it is loaded.
        version: its version when it is loaded.
        left: its version when it leaves.
        gradients: the update whose partial gradient sums are loaded with it, −1: none.
        gradients_left: likewise when it leaves.
        goes_at_once: whether it leaves right after its last visit, even if no other stage needs the slot.
    """

    stage: int
    slot: int
    before: Stay | None
    visits: list[int] = field(default_factory=list)
    start: int = 0
    version: int = 0
    left: int = 0
    gradients: int = -1
    gradients_left: int = -1
    goes_at_once: bool = False

    @property
    def first(self) -> int:
        """Its first visit."""
        return self.visits[0]

    @property
    def last(self) -> int:
        """Its last visit."""
        return self.visits[-1]


def stays_until(
    listed: Instructions, visited: Callable[[Instruction], Indices], step: Op, num_slots: int
) -> list[Stay]:
    """The stays of the stages that instructions visit; none goes beyond the step of its stage: it is stale then."""
    visits = []
    last: dict[int, int] = {}
    leaving = set()
    for index, i in enumerate(listed):
        stages = visited(i)
        if stages:
            visits.append((index, stages))
            last |= dict.fromkeys(stages, index)
        if i.op is step and i.stage in last:
            leaving.add((last[i.stage], i.stage))
    return stays(visits, num_slots, leaving)


def stays(visits: Sequence[Visit], num_slots: int, leaving: Collection[StageAt] = ()) -> list[Stay]:
    """The stays that serve some visits with the fewest loads, in the order of their first visits.

    The stage that is visited again the latest leaves; of those never visited again, the one that finished first.
    Source: Belady, "A study of replacement algorithms", IBM Systems Journal 5(2), 1966 (the rule MIN).

    >>> [(stay.stage, stay.slot, stay.visits) for stay in stays([(0, (0,)), (1, (1,)), (2, (2,)), (3, (1,))], 2)]
    [(0, 0, [0]), (1, 1, [1, 3]), (2, 0, [2])]

    Args:
        visits: the instructions that use stages, in order.
        num_slots: number of slots.
        leaving: index of an instruction and a stage that leaves after it, because its values there are stale.

    Raises:
        ScheduleError: one instruction uses more stages than there are slots.
    """
    coming = defaultdict(list)
    for index, stages in visits:
        for stage in stages:
            coming[stage].append(index)
    here: dict[int, Stay] = {}
    found = []
    free: list[tuple[int, Stay | None]] = [(slot, None) for slot in range(min(num_slots, len(coming)))]

    def urgency(stage: int, index: int) -> tuple[int, int]:
        later = coming[stage]
        place = bisect_right(later, index)
        again = _NEVER
        if place < len(later):
            again = later[place]
        return again, -here[stage].last

    for index, stages in visits:
        if len(stages) > num_slots:
            raise ScheduleError(
                f"stages {list(stages)} share a weight, so their gradients meet on the device: that takes "
                f"{len(stages)} slots, got {num_slots}"
            )
        for stage in stages:
            if stage not in here:
                if not free:
                    others = [other for other in here if other not in stages]
                    gone = here.pop(max(others, key=partial(urgency, index=index)))
                    free.append((gone.slot, gone))
                here[stage] = Stay(stage, *free.pop(0))
                found.append(here[stage])
            here[stage].visits.append(index)
        for stage in stages:
            if (index, stage) in leaving:
                gone = here.pop(stage)
                gone.goes_at_once = True
                free.append((gone.slot, gone))
    return found
