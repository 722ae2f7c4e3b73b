"""Spilling on one rank: its tier, its slots, the stores of its spilled stages, and the steps that are committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipefit.errors import PlanError
from pipefit.spec.sealed import FileEntry
from pipefit.spill.arena import Arena
from pipefit.spill.disk import DiskTier
from pipefit.spill.host import HostTier
from pipefit.spill.lanes import Copy, Lanes
from pipefit.spill.parked import ParkedTensors
from pipefit.spill.split_tier import SplitTier
from pipefit.spill.stage_store import SpilledStore
from pipefit.spill.tier_file import Commit
from pipefit.spill.tiers import TierStore


def tier_name(rank: int) -> str:
    """The name of the files of a rank's disk tier, without ending."""
    return f"rank-{rank}"


@dataclass(frozen=True)
class SpillPlace:
    """Where spilled stages live; not part of a plan, for it differs from machine to machine.

    Attributes:
        folder: of the disk tier; None: the host's memory.
        host_bytes: most that the host tier may take; with a folder, the rest lies there. None: no limit, or no host.
        direct: whether the disk is read and written past the page cache.
        about: JSON data that is kept with the records: what they are of.
        resume: from the records in the folder; a number: from that step or one before.
        commits: whether steps will be committed to the folder.
    """

    folder: Path | None = None
    host_bytes: int | None = None
    direct: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)
    resume: bool | int = False
    commits: bool = True

    def open(self, rank: int, kind: str, lanes: Lanes, device: torch.device) -> TierStore:
        """Opens the tier of a rank.

        Raises:
            PlanError: the plan spills to disk, and no folder is given.
            TierError: the folder cannot be used.
        """
        if kind == "host":
            return HostTier(self.host_bytes, lanes, device)
        if self.folder is None:
            raise PlanError("the plan spills to disk: say where, by --disk FOLDER or spill=Spilled(disk=FOLDER)")
        disk = DiskTier(self.folder, tier_name(rank), lanes, self.direct, device)
        disk.about = dict(self.about)
        if self.host_bytes is None:
            return disk
        return SplitTier(HostTier(None, lanes, device), disk, self.host_bytes, self.commits)


@dataclass
class Spilling:
    """Everything a rank has for spilling, over all its programs. `create.create_spilling` makes it.

    Attributes:
        stores: of its spilled stages.
        arena: the slots.
        tier: where the stages live.
        lanes: that copy.
        parked: activations that wait on the tier.
        resumed: what an earlier run committed, from which this one resumes.
        committed: the last commit that was started.
        committed_step: its step, or that of `resumed`.
        commit_every: steps from one commit to the next; 0: none.
        writes: started since the last commit.
        parts: norms of the gradients of stages that have left the device, by update and stage.
        steps: on the host, that this program has started.
    """

    stores: dict[int, SpilledStore]
    arena: Arena
    tier: TierStore
    lanes: Lanes
    parked: ParkedTensors
    resumed: Commit | None = None
    committed: Copy | None = None
    committed_step: int = 0
    commit_every: int = 1
    writes: list[Copy] = field(default_factory=list)
    parts: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)
    steps: list[Copy] = field(default_factory=list)

    def resume_from(self, step: int) -> None:
        """Before the first program: takes the records of a step that is not after the one that was found.

        Raises:
            TierError: they are not whole.
        """
        assert self.disk is not None and self.resumed is not None
        if step < self.resumed.step:
            self.resumed = self.disk.recover(step)
        self.disk.resume_from(self.resumed)
        self.committed_step = self.resumed.step
        for stage, store in self.stores.items():
            store.hold(self.resumed.version(stage))

    def end_pass(self) -> None:
        """A program has ended.

        Raises:
            TierError: the commit of the program before has failed.
        """
        self.parts.clear()
        steps, self.steps = self.steps, []
        for step in steps:
            # The optimizers' states may be read between two programs.
            step.wait()
        self.settle()

    @property
    def disk(self) -> DiskTier | SplitTier | None:
        """The tier, if its commits outlive the process."""
        return self.tier if isinstance(self.tier, DiskTier | SplitTier) else None

    def is_commit_due(self, step: int) -> bool:
        """Whether a step is to be committed."""
        return 0 < self.commit_every <= step - self.committed_step

    def check_writes(self) -> None:
        """Looks at the writes that have ended, where a step is not committed.

        Raises:
            TierError: one of them has failed.
        """
        under_way = [copy for copy in self.writes if not copy.ended()]
        for copy in self.writes:
            if copy not in under_way:
                copy.wait()
        self.writes = under_way

    def commit(self, step: int, state: Mapping[str, Any], tensors: FileEntry | bytes | None = None) -> None:
        """Starts to commit a step with all that was written.

        Args:
            step: weight updates done.
            state: JSON data: what else is needed to resume from there.
            tensors: a safetensors file with more of that, or the bytes of one.
        """
        assert self.disk is not None
        self.committed = self.disk.commit(step, state, self.writes, tensors)
        self.committed_step = step
        self.writes = []

    def settle(self) -> None:
        """Waits until the last commit that was started has ended.

        Raises:
            TierError: the tier has failed.
        """
        if self.committed is not None:
            committed, self.committed = self.committed, None
            committed.wait()

    def close(self, discard: bool = False) -> None:
        """Waits for the copies under way and closes the tier.

        Args:
            discard: whether the records are removed; else a disk keeps its file.
        """
        self.lanes.close()
        self.tier.close(discard)
