"""A trial that is open in a worker's process: its one rank with all shards as stages, and its tier.

All of it can be made again in any process. Between turns the shards' weights are on the tier, even if the process keeps
them too; another worker may have the same trial open, and the study gives a turn to one of them at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from pipefit.checkpoint.committed import restore_states
from pipefit.checkpoint.optim import optimization_of, optimizer_tensors
from pipefit.runtime.compiled import CompiledRank, compile_rank
from pipefit.runtime.engine import Engine
from pipefit.runtime.progress import Progress
from pipefit.runtime.session import Session
from pipefit.runtime.worker import Worker
from pipefit.spec import Partition
from pipefit.spec.options import Spilled
from pipefit.spill.arena import Arena
from pipefit.spill.lanes import Lanes
from pipefit.spill.optimizer_states import state_rules
from pipefit.spill.rank import Spilling, make_arena, make_stand_in
from pipefit.spill.stage_store import SpilledStore
from pipefit.spill.tiers import Key
from pipefit.stage.materialise import initialise, is_meta, stand_in
from pipefit.stage.split import NamedLayer
from pipefit.stage.ties import tied_groups
from pipefit.study.execute.admission import build_trial, on_meta, recipe_of
from pipefit.study.execute.trial_files import Resident, TrialState, commit_mark, open_tier, read_state, state_of
from pipefit.study.trial import NoRoomError, Trial
from pipefit.study.turns import Turn, step_program, turns_of

_RESIDENT = "resident"
_OWN = "own/"
_GRADIENT = "gradient/"
_SUMS = "sums/"


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
        self._device = device
        self._is_limited = capacity_bytes > 0
        self._mark: object = None
        self._loaded: set[int] = set()
        found = read_state(folder)
        is_new = found is None
        if found is not None:
            recipe = on_meta(trial) or recipe_of(trial)
            state = found[1]
        else:
            recipe, counts, figures = build_trial(trial, capacity_bytes)
            needed = figures.tier_bytes
            if needed > room_bytes:
                raise NoRoomError(f"its state needs {needed} bytes on the tier, {int(room_bytes)} are free")
            folder.mkdir(parents=True, exist_ok=True)
            state = TrialState(counts, figures)
        self.recipe = recipe
        self.state = state
        partition = Partition.from_counts(state.counts, len(recipe.layers))
        tied_groups(recipe.layers, partition)  # refuses shards that share a batch norm
        layers = {s: [recipe.layers[n] for n in part.layers] for s, part in enumerate(partition.stages)}
        training = recipe.training
        slots = 1 if self._is_limited else len(layers)
        self.program = step_program(len(layers), trial.microbatches, training.clip_norm is not None, slots)
        drawn = {stage for stage, listed in layers.items() if is_meta(listed)}
        stand_in(recipe.layers, partial(make_stand_in, device=device))
        (shared, resident), rules = _places(layers), state_rules(training.optimizer, device)
        header = self.program.header
        stores = {s: SpilledStore(s, listed, shared, training, header, rules, device) for s, listed in layers.items()}
        self.tier = open_tier(folder, Lanes(device, threaded=False), device)
        self.spilling = Spilling(stores, Arena({}, {}, device), self.tier)
        self._has_slots = False
        if is_new:
            self.spilling.make_room(self.program, 0, Spilled())
            self.take_slots()
        for stage, store in stores.items():
            if is_new:
                if stage in drawn:
                    fill = partial(initialise, layers[stage], training.seed, recipe.initialise)
                else:
                    fill = None
                store.store_first(stage % slots, fill)
            else:
                store.attach(self.spilling.arena, self.tier)
                store.hold(0)
        self.worker = Worker.create(0, training, layers, {}, device, self.spilling)
        self.engine = Engine([self.worker], len(layers), Session(0, 1, None, Progress()), device)
        self._has_shared = bool(shared)
        # Weights of several shards belong to the first of them.
        self._own = {s: [places[0] for places in resident if places[0].stage == s] for s in layers}
        used = [(place.stage, places[0].stage) for places in resident for place in places]
        self._homes = {s: {s} | {home for user, home in used if user == s} for s in layers}
        if is_new:
            for stage in stores:
                self.keep_resident(stage)
            self.commit(0)
            self.release()

    @cached_property
    def turns(self) -> list[tuple[Turn, CompiledRank]]:
        """The turns of a step, each with its compiled list."""
        whole = compile_rank(self.program, 0)
        return [(turn, whole.part(turn.first, turn.end)) for turn in turns_of(self.program)]

    # ---- commits ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Reads the last commit, where another process has made it.

        Raises:
            DamageError: it is damaged.
        """
        if self._mark != (mark := commit_mark(self.folder)):
            commit = self.tier.recover(check=False)
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

    def take_slots(self) -> None:
        """Allocates slots on the device, if there are none."""
        if not self._has_slots:
            spill = self.program.header.spill
            assert spill is not None
            self._attach(make_arena(self.spilling.stores.values(), spill, self._device))
            self._has_slots = True

    @property
    def held_bytes(self) -> int:
        """Bytes of the device that the trial holds between turns."""
        if self._has_slots:
            return self.spilling.arena.num_bytes
        return 0

    def end_turn(self) -> None:
        """Releases the weights that shards share, under a limit."""
        if self._is_limited and self._has_shared:
            self.release()

    def release(self) -> None:
        """Releases the device's memory; the tier holds all state."""
        self._attach(Arena({}, {}, self._device))
        self._has_slots = False
        self._loaded.clear()
        for home, own in self._own.items():
            for _, module, key in own:
                if (parameter := module._parameters.get(key)) is not None:
                    self.spilling.stores[home].point(parameter, make_stand_in(parameter, self._device))
                    parameter.grad = None
                    if home in self.worker.optimizers:
                        self.worker.optimizers[home].state.clear()

    def close(self) -> None:
        """Ends the use of the tier; turns that were not committed are lost."""
        self.release()  # its tensors and hooks refer to each other: nothing else would free them soon
        self.spilling.tier.close()

    def _attach(self, arena: Arena) -> None:
        self.spilling.arena = arena
        for store in self.spilling.stores.values():
            store.attach(arena, self.tier)

    # ---- resident state --------------------------------------------------------------------------------------------

    def load_resident(self, stage: int) -> None:
        """Updates the state of a shard that is not in its records."""
        for home in sorted(self._homes[stage] - self._loaded):
            self._restore(home)
        self._loaded |= self._homes[stage]

    def keep_resident(self, stage: int) -> None:
        """Starts to write the state of a shard that is not in its records."""
        for home in sorted(self._homes[stage]):
            found = dict(self._resident(home))
            if found:
                self.spilling.writes.append(self.spilling.resident.write(Key(home, _RESIDENT), list(found.values())))
            states = self.spilling.stores[home].states
            if states:
                known = sorted(states.known)
            else:
                known = []
            self.state.residents[home] = Resident(list(found), optimization_of(self.worker, [home]), known)
        self._loaded |= self._homes[stage]

    def _resident(self, home: int) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of buffers, weights that several shards use, sums of batch norms, and states of a shard."""
        for place, (_, module, key) in enumerate(self._own[home]):
            tensor = getattr(module, key)
            yield f"{_OWN}{place}", tensor.detach()
            if tensor.grad is not None:
                yield f"{_GRADIENT}{place}", tensor.grad
        for place, norm in enumerate(self.worker.stages[home].batchnorms):
            if (sums := norm.gathered(0)) is not None:
                yield f"{_SUMS}{place}", sums
        moved = self.spilling.stores[home].stand_ins
        for name, value in optimizer_tensors(self.worker, home, all_ties=True):
            if value.data_ptr() not in moved:
                yield name, value

    @torch.no_grad()
    def _restore(self, home: int) -> None:
        """Restores the state of a shard that is not in its records."""
        state = self.state.residents[home]
        tensors = {}
        if state.tensors:
            copy, read = self.spilling.resident.read(Key(home, _RESIDENT), keep=True)
            copy.wait()
            # Copies, because the buffers of reads are used again for writes.
            tensors = {name: tensor.clone() for name, tensor in zip(state.tensors, read(), strict=True)}
        for place, (_, module, key) in enumerate(self._own[home]):
            tensor = getattr(module, key)
            value = tensors.pop(f"{_OWN}{place}")
            if isinstance(tensor, nn.Parameter):
                self.spilling.stores[home].point(tensor, value.to(self._device))
                gradient = tensors.pop(f"{_GRADIENT}{place}", None)
                if gradient is None:
                    tensor.grad = None
                else:
                    tensor.grad = gradient.to(self._device)
            else:
                tensor.copy_(value)
        for place, norm in enumerate(self.worker.stages[home].batchnorms):
            sums = tensors.pop(f"{_SUMS}{place}", None)
            norm.replace(0, None if sums is None else sums.to(self._device))
        restore_states(self.worker, home, state.optimization, state.known, tensors)


class _Place(NamedTuple):
    """A place of a parameter or buffer: a shard, one of its modules, and the key there."""

    stage: int
    module: nn.Module
    key: str


def _places(layers: Mapping[int, Sequence[NamedLayer]]) -> tuple[set[int], list[list[_Place]]]:
    """The places of tensors that no record of a shard holds.

    Returns:
        Ids of the parameters that several shards use, and the places of each of them and of each buffer.
    """
    found: dict[object, list[_Place]] = {}
    for stage, listed in layers.items():
        for module in (module for layer in listed for module in layer.module.modules()):
            for key, parameter in module.named_parameters(recurse=False):
                found.setdefault(id(parameter), []).append(_Place(stage, module, key))
            for key, _ in module.named_buffers(recurse=False):
                found.setdefault((id(module), key), []).append(_Place(stage, module, key))
    shared = {what for what, places in found.items() if isinstance(what, int) and len({p.stage for p in places}) > 1}
    return shared, [places for what, places in found.items() if what in shared or isinstance(what, tuple)]
