"""A trial that is open in a worker's process: its one rank with all shards as stages, and its tier.

All of it can be made again in any process. Between turns the shards' weights are on the tier, even if the process keeps
them too; another worker may have the same trial open, and the study gives a turn to one of them at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch

from pipefit.checkpoint.optim import optimization_of
from pipefit.checkpoint.resident import read_resident, resident_tensors, restore_resident, write_resident
from pipefit.runtime.engine import Engine
from pipefit.runtime.progress import Progress
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.spec import Partition
from pipefit.spec.options import Spilled
from pipefit.spill.rank import RankStages, Spilling, make_stand_in
from pipefit.stage.split import NamedLayer, joined
from pipefit.stage.ties import tied_groups
from pipefit.study.execute.admission import build_trial, on_meta, recipe_of
from pipefit.study.execute.trial_files import Resident, TrialState, commit_mark, open_tier, read_state, state_of
from pipefit.study.trial import NoRoomError, Trial
from pipefit.study.turns import Turn, step_program, turns_of


class OpenTrial:
    """An open trial at its last commit; one without a commit is built, split and written to the tier.

    The first weights are written to the tier shard by shard, so that a model built without weights never has more than
    one shard in memory.

    Args:
        number: in the study.
        trial: its definition.
        folder: of the trial, on the tier.
        device: of this worker.
        capacity_bytes: of the device. Under a limit one shard at a time is there; without one (0) each has a slot.
        room_bytes: free on the tier.

    Attributes:
        number, trial, folder: as given.
        recipe: model, training and data.
        program: of a step.
        worker: the rank.
        engine: of that one rank.
        spilling: of the rank.
        step: of the last commit that was read or written.
        state: of that commit; changed in place until the next.

    Raises:
        InfeasibleError: it needs more memory than the device has, for every split.
        NoRoomError: the tier has no space for it now.
    """

    def __init__(
        self,
        number: int,
        trial: Trial,
        folder: Path,
        device: torch.device,
        capacity_bytes: float = 0.0,
        room_bytes: float = math.inf,
    ) -> None:
        self.number = number
        self.trial = trial
        self.folder = folder
        self.step = 0
        self._is_limited = capacity_bytes > 0
        self._mark: object = None
        self._loaded: set[int] = set()
        found = read_state(folder)
        if found is not None:
            self.recipe = on_meta(trial) or recipe_of(trial)
            self.state = found[1]
        else:
            self.recipe, counts, figures = build_trial(trial, capacity_bytes)
            needed = figures.tier_bytes
            if needed > room_bytes:
                raise NoRoomError(f"its state needs {needed} bytes on the tier, {int(room_bytes)} are free")
            folder.mkdir(parents=True, exist_ok=True)
            self.state = TrialState(counts, figures)
        layers, training = self.recipe.layers, self.recipe.training
        partition = Partition.from_counts(self.state.counts, len(layers))
        tied_groups(layers, partition)  # refuses shards that share a batch norm
        shards = {shard: [layers[n] for n in part.layers] for shard, part in enumerate(partition.stages)}
        num_slots = 1 if self._is_limited else len(shards)
        self.program = step_program(len(shards), trial.microbatches, training.clip_norm is not None, num_slots)
        stages = RankStages(0, shards, {}, self.recipe.initialise)
        where = Spilled() if found is None else None
        opening = partial(open_tier, folder, device)
        self.spilling = Spilling.create(stages, self.program, training, device, opening, where)
        self.worker = Worker.create(0, training, shards, {}, device, self.spilling)
        self.engine = Engine([self.worker], len(shards), Session(0, 1, None, Progress()), device)
        self._homes = _homes(shards)
        if found is None:
            for shard in shards:
                self.keep_resident(shard)
            self.commit(0)
            self.release()

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of a step."""
        return turns_of(self.program)

    # ---- commits ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Reads the last commit, where another process has made it.

        Raises:
            DamageError: it is damaged.
        """
        if self._mark != (mark := commit_mark(self.folder)):
            commit = self.spilling.tier.recover(check=False)
            self.step = commit.step
            self.state = state_of(commit)
            self._mark = mark
            self.spilling.parked.restore(self.state.parked)
            self.spilling.resident.restore(self.state.places)
            self._loaded.clear()

    def commit(self, step: int) -> None:
        """Commits all written records, and the state."""
        self.state.parked = self.spilling.parked.describe()
        self.state.places = self.spilling.resident.describe()
        self.spilling.commit(step, msgspec.to_builtins(self.state, str_keys=True))
        self.spilling.settle()
        self.step, self._mark = step, commit_mark(self.folder)

    # ---- the device's memory ---------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that the trial holds between turns."""
        if self.spilling.has_slots:
            return self.spilling.arena.num_bytes
        return 0

    def end_turn(self) -> None:
        """Releases the weights that shards share, under a limit."""
        if self._is_limited and any(store.staying for store in self.spilling.stores.values()):
            self.release()

    def release(self) -> None:
        """Releases the device's memory; the tier holds all state."""
        self.spilling.free_slots()
        self._loaded.clear()
        for stage, store in self.spilling.stores.items():
            for parameter in store.staying:
                store.point(parameter, make_stand_in(parameter, self.worker.device))
                parameter.grad = None
            if store.staying and stage in self.worker.optimizers:
                self.worker.optimizers[stage].state.clear()

    def close(self) -> None:
        """Ends the use of the tier; turns that were not committed are lost."""
        self.release()  # its tensors and hooks refer to each other: nothing else would free them soon
        self.spilling.tier.close()

    # ---- resident state --------------------------------------------------------------------------------------------

    def load_resident(self, stage: int) -> None:
        """Updates the state of a shard that is not in its records."""
        for home in sorted(self._homes[stage] - self._loaded):
            self._restore(home)
        self._loaded |= self._homes[stage]

    def keep_resident(self, stage: int) -> None:
        """Starts to write the state of a shard that is not in its records."""
        moved = {address for store in self.spilling.stores.values() for address in store.stand_ins}
        for home in sorted(self._homes[stage]):
            # Tensors of several shards belong to the first of them.
            passed = moved.union(*(self._addresses(other) for other in self._homes[home] - {home}))
            rows = write_resident(self.spilling, resident_tensors(self.worker, home, passed, unsaved=True))
            known = sorted(self.worker.stores[home].known_states)
            self.state.residents[home] = Resident(rows, optimization_of(self.worker, [home]), known)
        self._loaded |= self._homes[stage]

    def _addresses(self, stage: int) -> set[int]:
        """The addresses of a shard's weights and buffers, and of the gradients of these weights."""
        own = joined(self.worker.stages[stage].layers)
        gradients = [weight.grad for weight in own.parameters() if weight.grad is not None]
        return {tensor.data_ptr() for tensor in (*own.parameters(), *own.buffers(), *gradients)}

    def _restore(self, home: int) -> None:
        """Restores the state of a shard that is not in its records."""
        state = self.state.residents[home]
        tensors = read_resident(self.spilling, state.rows, keep=True).get(home, {})
        store = self.spilling.stores[home]
        for name, parameter in self.worker.stages[home].named_parameters():
            if name in tensors:
                store.point(parameter, torch.empty_like(parameter.data))
        restore_resident(self.worker, home, tensors, state.optimization, state.known)


def _homes(shards: Mapping[int, Sequence[NamedLayer]]) -> dict[int, set[int]]:
    """Each shard, with the earlier ones that are the first to have one of its weights or buffers."""
    first: dict[int, int] = {}
    homes = {}
    for shard, layers in shards.items():
        own = joined(layers)
        tensors = (*own.parameters(), *own.buffers())
        homes[shard] = {shard, *(first.setdefault(id(tensor), shard) for tensor in tensors)}
    return homes
