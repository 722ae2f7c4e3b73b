"""A trial that is open in a worker's process: its one rank with all shards as stages, and its tier.

All of it can be made again in any process. Between turns the shards' weights are on the tier, whatever else the process
keeps; another worker may have the same trial open, and the study gives a turn to one of them at a time.
"""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path

import msgspec
import torch

from pipefit.ir.op import Kind, Op
from pipefit.runtime.compiled import CompiledRank, compile_rank
from pipefit.runtime.engine import Engine
from pipefit.runtime.progress import Progress
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.spec import Partition
from pipefit.spill.arena import Arena
from pipefit.spill.create import draw, make_arena, make_stand_in, make_store
from pipefit.spill.lanes import Lanes
from pipefit.spill.optimizer_states import state_rules
from pipefit.spill.parked import ParkedTensors
from pipefit.spill.rank import Spilling
from pipefit.spill.tiers import Key
from pipefit.stage.materialise import is_meta, stand_in
from pipefit.stage.ties import tied_groups
from pipefit.study.execute.admission import Recipe
from pipefit.study.execute.resident import ResidentState, shared_parameters
from pipefit.study.execute.trial_files import TrialState, commit_mark, open_tier, state_of
from pipefit.study.turns import Turn, step_program, turns_of

_RESIDENT = "resident"


class OpenTrial:
    """An open trial.

    Args:
        recipe: what trains.
        microbatches: of a step.
        state: where the trial stands; of a new one, how it is cut.
        folder: its own.
        device: where it computes.
        is_limited: whether one shard at a time may be on the device; else each has a slot of its own.
        is_new: the first weights go to the tier, shard by shard, so that there is never more than one in memory of a
            model that came without; else the tier has the weights.

    Attributes:
        recipe: as given.
        program: of a step.
        worker: the rank.
        engine: of that one rank.
        spilling: of the rank.
        step: of the last commit that was read or written.
        state: of that commit; changed in place until the next.
    """

    def __init__(
        self,
        recipe: Recipe,
        microbatches: int,
        state: TrialState,
        folder: Path,
        device: torch.device,
        is_limited: bool,
        is_new: bool,
    ) -> None:
        self.recipe, self.state, self.step = recipe, state, 0
        self._folder, self._device = folder, device
        self._mark: object = None
        self._loaded: dict[int, tuple[int, bytes]] = {}
        partition = Partition.from_counts(state.counts, len(recipe.layers))
        tied_groups(recipe.layers, partition)  # refuses shards that share a batch norm
        layers = {s: [recipe.layers[n] for n in part.layers] for s, part in enumerate(partition.stages)}
        training, slots = recipe.training, 1 if is_limited else len(layers)
        self.program = step_program(len(layers), microbatches, training.clip_norm is not None, slots)
        drawn = {stage for stage, listed in layers.items() if is_meta(listed)}
        stand_in(recipe.layers, partial(make_stand_in, device=device))
        shared, rules = shared_parameters(layers), state_rules(training.optimizer, device)
        header = self.program.header
        stores = {s: make_store(s, listed, shared, training, header, rules, device) for s, listed in layers.items()}
        lanes = Lanes(device, threaded=False)
        self.tier = open_tier(folder, lanes, device)
        self.spilling = Spilling(stores, Arena({}, {}, device), self.tier, lanes, ParkedTensors(self.tier, device))
        self._has_slots = False
        if is_new:
            self._reserve()
            self.take_slots()
        for stage, store in stores.items():
            if is_new:
                fill = partial(draw, layers[stage], training.seed, recipe.initialise) if stage in drawn else None
                store.store_first(stage % slots, fill)
            else:
                store.attach(self.spilling.arena, self.tier, lanes)
                store.hold(0)
        self.worker = Worker.create(0, training, layers, {}, device, self.spilling)
        self.engine = Engine([self.worker], len(layers), Session(0, 1, None, Progress()), device)
        self.resident = ResidentState(self.worker, shared)

    def _reserve(self) -> None:
        """Makes room on the tier for all records but data at the cuts."""
        evicted = {i.stage for i in self.program.ranks[0] if i.op is Op.EVICT and i.kind == Kind.WGRAD}
        sizes = {key: size for store in self.spilling.stores.values() for key, size in store.sizes().items()}
        kept = {key: size for key, size in sizes.items() if key.kind != Kind.WGRAD or key.stage in evicted}
        self.tier.reserve(kept, [key for key in kept if key.kind == Kind.WGRAD])

    @cached_property
    def turns(self) -> list[tuple[Turn, CompiledRank]]:
        """The turns of a step, and what the executor runs for each."""
        whole = compile_rank(self.program, 0)
        return [(turn, whole.part(turn.first, turn.end)) for turn in turns_of(self.program)]

    # ---- commits ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Takes up the last commit, where another process has made it.

        Raises:
            DamageError: it is damaged.
        """
        if self._mark != (mark := commit_mark(self._folder)):
            commit = self.tier.recover(check=False)
            self.step, self.state, self._mark = commit.step, state_of(commit), mark
            self.spilling.parked.restore(self.state.parked)

    def commit(self, step: int) -> None:
        """Commits all that was written, and the state."""
        self.state.parked = self.spilling.parked.describe()
        self.spilling.commit(step, msgspec.to_builtins(self.state, str_keys=True))
        self.spilling.settle()
        self.step, self._mark = step, commit_mark(self._folder)

    # ---- the device's memory ---------------------------------------------------------------------------------------

    def take_slots(self) -> None:
        """Sees to slots on the device."""
        if not self._has_slots:
            spill = self.program.header.spill
            assert spill is not None
            self._attach(make_arena(self.spilling.stores.values(), spill, self._device))
            self._has_slots = True

    @property
    def slot_bytes(self) -> int:
        """Bytes of its slots."""
        return self.spilling.arena.num_bytes if self._has_slots else 0

    def release(self) -> None:
        """Releases the device's memory; the tier has everything."""
        self._attach(Arena({}, {}, self._device))
        self._has_slots = False
        if self.resident.is_shared:
            self.resident.release()
            self._loaded.clear()

    def _attach(self, arena: Arena) -> None:
        self.spilling.arena = arena
        for store in self.spilling.stores.values():
            store.attach(arena, self.tier, self.spilling.lanes)

    # ---- what is resident ------------------------------------------------------------------------------------------

    def load_resident(self, stage: int) -> None:
        """Brings what a shard needs in addition to its records up to date."""
        for home in sorted(self.resident.homes(stage)):
            version = self.state.residents[home]
            if self._loaded.get(home, (-1, b""))[0] != version:
                copy, tensors = self.spilling.parked.read(Key(home, _RESIDENT, version % 2), keep=True)
                copy.wait()
                data = bytes(tensors()[0].cpu().numpy())
                self.resident.unpack(home, data)
                self._loaded[home] = version, data

    def keep_resident(self, stage: int) -> None:
        """Writes the resident state of a shard where it has changed: not over the one that the last commit names."""
        before, known = self._loaded.get(stage, (-1, b""))
        data = self.resident.pack(stage)
        if data != known:
            version = before + 1
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self.spilling.writes.append(self.spilling.parked.write(Key(stage, _RESIDENT, version % 2), [tensor]))
            self._loaded[stage] = version, data
            self.state.residents[stage] = version
