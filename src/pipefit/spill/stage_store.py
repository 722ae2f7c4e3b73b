"""The weights of one spilled stage: on the device only while the stage is in a slot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.errors import ModelError
from pipefit.ir.program import Header
from pipefit.parallel.buckets import GradientBuckets, record_layout
from pipefit.parallel.weights import Piece, Store
from pipefit.spill.arena import Arena, Slot, save_places
from pipefit.spill.lanes import Copy, Work
from pipefit.spill.optimizer_states import MovedStates, StateRules, probe_states
from pipefit.spill.tier_store import TierStore
from pipefit.spill.tiers import OPTIM, WEIGHTS, WGRAD, Key
from pipefit.stage.accelerator import CPU
from pipefit.stage.half_copies import HalfCopies
from pipefit.stage.record_layout import Layout, absent
from pipefit.stage.split import NamedLayer, joined
from pipefit.stage.training import Training


class SpilledStore(Store):
    """The store of a spilled stage, whose weights are on the device only while the stage is in a slot.

    Its parameters are views of a slot while the stage is there. Otherwise they have their shapes and no memory, and
    reading them gives NaN. Gradients are summed in the second slot next to it, and the optimizer's states are views of
    their own slot, or stay.

    Args:
        stage: its number.
        layers: of the stage.
        shared: ids of the parameters that several stages use; they stay on the device.
        training: its optimizer.
        header: of the program; it specifies the place of the step, and whether the optimizer's states move.
        rules: of the optimizer.
        device: of the slots.

    Raises:
        ModelError: it cannot step on the host, or its optimizer cannot be spilled.

    Attributes:
        masters: the parameters that the optimizer gets.
        on_host: whether it steps on the host: the optimizer gets views of its records there, and its states never
            leave them.
        num_updates: updates before this program, whose version 0 the tier holds.
        sizes: bytes of each of its records, by kind.
        reached: places of the gradients of this update that a micro-batch has reached so far.
        states: of its optimizer, where they move; None: they stay on the device.
        staying: the parameters that stay on the device.
        summed: the parameters whose gradients are in the slot.
        gradients: their places there.
        on_arrival: called with the slot's memory for gradients when the stage is loaded into it.
    """

    def __init__(
        self,
        stage: int,
        layers: Sequence[NamedLayer],
        shared: set[int],
        training: Training,
        header: Header,
        rules: StateRules,
        device: torch.device,
    ) -> None:
        self.stage, self.on_host = stage, header.steps_on_host(stage)
        parameters = list(joined(layers).parameters())
        trained = [p for p in parameters if p.requires_grad]
        self.summed = [p for p in trained if id(p) not in shared]
        if self.on_host and len(self.summed) < len(trained):
            raise ModelError(
                f"stage {stage} shares a weight with another, which stays on the device: it cannot step on the host"
            )
        self.staying = [p for p in parameters if id(p) in shared]
        self._moved = self.summed + [p for p in parameters if not p.requires_grad and id(p) not in shared]
        self.layout = Layout(self._moved)
        # The gradients are in the slot in the order in which replicas reduce them.
        is_replicated = len(header.placement[stage]) > 1
        if is_replicated:
            self.gradients = record_layout(self.summed)[1]
        else:
            self.gradients = Layout(self.summed)
        self._on_arrival: Callable[[Tensor], None] | None = None
        self.states: MovedStates | None = None
        if not header.keeps_states(stage):
            where = device
            if self.on_host:
                where = CPU
                rules = rules._replace(numbers={})
            specs = [(trained[spec.parameter], spec) for spec in probe_states(training.optimizer, trained, where)]
            moving = [(parameter, spec) for parameter, spec in specs if id(parameter) not in shared]
            self.states = MovedStates(stage, moving, rules, device)
        self.sizes = {WEIGHTS: self.layout.num_bytes, WGRAD: self.gradients.num_bytes}
        if self.states is not None:
            self.sizes[OPTIM] = self.states.layout.num_bytes
        self._trained: list[nn.Parameter] = []
        self._master_of: dict[int, nn.Parameter] = {}
        self._device = device
        self.num_updates = self._version = 0
        self._is_held = False
        self._slots: dict[str, int] = {}
        self.reached: set[int] = set()
        self._read: Copy | None = None
        self.masters: list[nn.Parameter] = []
        self.pieces: list[Piece] = []
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._keep, place))
            for place, parameter in enumerate(self.summed)
        ]

    def let_go(self) -> None:
        """Takes its hooks from the weights, which would keep it and its slots in memory."""
        for hook in self._hooks:
            hook.remove()

    # ---- before the first program ----------------------------------------------------------------------------------

    def attach(self, arena: Arena, tier: TierStore) -> None:
        """Gets its slots and its tier."""
        self._arena, self._tier = arena, tier

    @torch.no_grad()
    def store_first(self, slot: int, fill: Callable[[], None] | None = None, held: int | None = None) -> None:
        """Moves its weights to the tier, through a slot, and frees their former memory.

        Args:
            slot: for the transfer.
            fill: sets the first values of the weights, in the slot; None: they have them already.
            held: the version of its records on the tier, of an earlier run; nothing is written then.
        """
        room = self._free(WEIGHTS, slot)
        for view, parameter in zip(self.layout.views(room.bytes), self._moved, strict=True):
            if fill is None and held is None:
                view.copy_(parameter.data)
            parameter.data = view
        if fill is not None:
            fill()  # buffers too
        if held is not None:
            self.hold(held)
            return
        self._unbind()
        record = room.bytes[: self.layout.num_bytes]
        room.busy.append(self._tier.write(Key(self.stage, WEIGHTS), 0, record))

    def hold(self, version: int) -> None:
        """Marks its records on the tier as holding a version."""
        self.num_updates, self._is_held = version, True
        self._unbind()

    @property
    def stand_ins(self) -> set[int]:
        """Addresses of the stand-ins for weights and states while its records hold them."""
        held: list[Tensor] = list(self._moved)
        if self.states is not None and not self.on_host:
            held += self.states.tensors()
        return {tensor.data_ptr() for tensor in held}

    def make_masters(self, trained: Sequence[nn.Parameter]) -> None:
        """Makes the optimizer's parameters; they always share the memory of the live ones.

        Args:
            trained: those that this stage's optimizer steps: all except shared ones that another stage's steps.
        """
        self._trained = list(trained)
        where: dict[int, Tensor] = {}
        if self.on_host:
            views = self.layout.views(self._tier.record(Key(self.stage, WEIGHTS)))
            where = {id(parameter): view for parameter, view in zip(self._moved, views, strict=True)}
        self.masters = [nn.Parameter(where.get(id(parameter), parameter.data)) for parameter in self._trained]
        self._master_of = {id(p): master for p, master in zip(self._trained, self.masters, strict=True)}

    def take_optimizer(self, optimizer: Optimizer) -> None:
        """Sets the optimizer whose states it moves; states that exist already are moved to the tier."""
        if self.states is None:
            return
        self.states.belong_to(optimizer, self._master_of)
        if self._is_held:
            self.states.unbind()
        elif self.on_host:
            self._adopt_states()
        elif any(optimizer.state.values()):
            self._slots[OPTIM] = 0
            self._free(OPTIM, 0)
            self._adopt_states()
            self.evict(OPTIM, 0)

    @property
    def known_states(self) -> set[int]:
        """Places of the states that its optimizer has made, in the records."""
        return self.states.known if self.states is not None else set()

    @known_states.setter
    def known_states(self, places: set[int]) -> None:
        if self.states is not None:
            self.states.known = places

    # ---- copies ----------------------------------------------------------------------------------------------------

    def fetch(self, kind: str, version: int, slot: int) -> Copy:
        """Starts to load a record into a slot, once no copy reads that slot any more.

        Weights or states that left the slot last are still there: those of the first stages of a step, which are also
        the last that the step before has written. They are not read again, and need not wait for the end of their
        write.

        Args:
            kind: "weights", "optim" or "wgrad".
            version: of the weights, in the program that runs; of gradients, their update.
            slot: its number; gradients use the second slot next to the stage's weights.
        """
        room = self._arena.slot(kind, slot)
        kept, room.kept = room.kept, None
        if kept == (self, self.num_updates + version):
            return self._tier.lanes.read.submit(lambda: None, self._gradients_leave(kind, slot))
        waits = room.taken() + self._gradients_leave(kind, slot)
        into = room.bytes[: self.sizes[kind]]
        key = Key(self.stage, kind)
        if kind == OPTIM and self._tier.holds(key) is None:
            # No step yet: there is nothing to read.
            return self._tier.lanes.read.submit(into.zero_, waits)
        copy = self._tier.read(key, self.num_updates + version, into, waits)
        if kind == WEIGHTS:
            self._read = copy
        return copy

    def _gradients_leave(self, kind: str, slot: int) -> tuple[Copy, ...]:
        """The copies of gradients next to the slot of a stage's weights."""
        if kind == WEIGHTS:
            return self._arena.slot(WGRAD, slot).taken()
        return ()

    def arrived(self, kind: str, version: int, slot: int) -> None:
        """After a fetch: makes the stage's tensors views of the slot."""
        self._slots[kind] = slot
        record = self._arena.slot(kind, slot).bytes
        if kind == WEIGHTS:
            self._version = version
            for parameter, view in zip(self._moved, self.layout.views(record), strict=True):
                self.point(parameter, view)
            if self._on_arrival is not None:
                self._on_arrival(self._arena.slot(WGRAD, slot).bytes)
        elif kind == OPTIM:
            assert self.states is not None
            self.states.bind(record)
        else:
            for place in self.reached:
                self.summed[place].grad = self.gradients.fields[place].of(record)

    def evict(self, kind: str, version: int) -> Copy:
        """Starts to write a record back; its slot is free once that has ended."""
        if kind == WGRAD:
            self._gather_gradients()
        slot = self._slots.pop(kind)
        room = self._arena.slot(kind, slot)
        version += self.num_updates
        copy = self._tier.write(Key(self.stage, kind), version, room.bytes[: self.sizes[kind]])
        room.busy.append(copy)
        if kind != WGRAD:
            room.kept = self, version
        if kind == WEIGHTS:
            self._unbind()
        elif kind == OPTIM:
            assert self.states is not None
            self.states.unbind()
        else:
            for parameter in self.summed:
                parameter.grad = None
        return copy

    def saving(self, halves: HalfCopies) -> contextlib.AbstractContextManager[None]:
        """The context of a forward whose stage may leave before its backward: see `save_places`."""
        return save_places(lambda: self._arena.slot(WEIGHTS, self._slots[WEIGHTS]).bytes, halves)

    # ---- as every Store does ----------------------------------------------------------------------------------------

    def at(self, version: int) -> None:
        """Checks that the version is in a slot; it is the only one that can be."""
        assert WEIGHTS in self._slots, f"stage {self.stage} is not on the device"
        assert version == self._version, f"stage {self.stage}: version {self._version} is there, not {version}"

    def take_changes(self) -> None:
        """Refuses changes of parameters whose numbers are in the records."""
        if WEIGHTS not in self._slots and self._marks() != self._unbound:
            raise ModelError(
                f"a parameter of stage {self.stage} was changed between two steps, when its weights are on the host or "
                "on disk, so the change would be lost: change weights with load_state_dict of the Pipeline"
            )

    def begin_step(self, version: int, in_place: bool) -> None:
        """Passes the gradients to the optimizer, which works in the slots once they are no longer being written."""
        self.at(version)
        for kind in {WEIGHTS, OPTIM} & self._slots.keys():
            self._free(kind, self._slots[kind])
        for parameter, master in zip(self._trained, self.masters, strict=True):
            master.grad = parameter.grad
        self._version = version + 1

    def end_step(self) -> None:
        """Frees the gradients; moves states that the optimizer has just made to their slot."""
        for parameter, master in zip(self._trained, self.masters, strict=True):
            master.grad = parameter.grad = None
        self.reached.clear()
        self._slots.pop(WGRAD, None)
        self._adopt_states()

    def step_on_host(self, version: int, work: Work | None) -> Copy:
        """Starts a step on the host, from its records of weights and gradients there; both have left the device.

        Args:
            version: of the weights from which it starts.
            work: the optimizer's step, on the gradients of its parameters; None: this step is skipped.
        """
        reached = sorted(self.reached)
        self.reached.clear()
        self._version = version + 1

        def step() -> None:
            if work is None:
                return
            record = self._tier.record(Key(self.stage, WGRAD))
            for place in reached:
                master = self._master_of.get(id(self.summed[place]))
                if master is not None:
                    master.grad = self.gradients.fields[place].of(record)
            work()
            for master in self.masters:
                master.grad = None
            self._adopt_states()

        after = []
        if self._read is not None:
            after.append(self._read)
        return self._tier.step(self.stage, self.num_updates + version + 1, step, after)

    def drop(self, version: int) -> None:
        """Frees the slot of weights that are unchanged on the tier."""
        self.at(version)
        self._arena.slot(WEIGHTS, self._slots.pop(WEIGHTS)).kept = self, self.num_updates + version
        self._unbind()

    def rebase(self) -> None:
        """Renumbers the newest version as 0."""
        self.num_updates += self._version
        self._version = 0

    def make_buckets(self, untied: Sequence[nn.Parameter]) -> GradientBuckets:
        """Buckets in the slot next to the stage's weights, wherever that is."""
        buckets = GradientBuckets(self.summed, spilled=True)
        self._on_arrival = buckets.place_in
        return buckets

    @contextlib.contextmanager
    def present(self, optim: bool = False, change: bool = False) -> Iterator[None]:
        """Between programs: brings the stage onto the device.

        Args:
            optim: also its optimizer's states.
            change: write changes back, with the optimizer's states.
        """
        kinds = [WEIGHTS]
        if (optim or change) and self.states is not None and not self.on_host:
            kinds.append(OPTIM)
        for kind in kinds:
            self.fetch(kind, 0, 0).wait()
            self.arrived(kind, 0, 0)
        try:
            yield
        finally:
            if not change:
                self.drop(0)
                if self._slots.pop(OPTIM, None) is not None and self.states is not None:
                    self.states.unbind()
        if not change:
            return
        if OPTIM in kinds or self.on_host:
            self._adopt_states()
        self._version = 1
        for kind in kinds:
            self.evict(kind, 1).wait()
        self.rebase()

    # ---- inside ----------------------------------------------------------------------------------------------------

    def _free(self, kind: str, slot: int) -> Slot:
        """A slot, for work that is ordered after all copies of it."""
        room = self._arena.slot(kind, slot)
        for copy in room.taken():
            copy.join()
        return room

    def _keep(self, place: int, parameter: Tensor) -> None:
        """Moves a gradient that autograd has made to its place in the slot, where autograd then adds to it."""
        if place in self.reached or WEIGHTS not in self._slots or parameter.grad is None:
            return
        record = self._arena.slot(WGRAD, self._slots[WEIGHTS]).bytes
        self._slots[WGRAD] = self._slots[WEIGHTS]
        view = self.gradients.fields[place].of(record)
        view.copy_(parameter.grad.to_dense())
        parameter.grad = view
        self.reached.add(place)

    def point(self, parameter: nn.Parameter, data: Tensor) -> None:
        """Makes a tensor the data of a parameter, and of the optimizer's copy of it."""
        parameter.data = data
        master = self._master_of.get(id(parameter))
        if master is not None and not self.on_host:
            master.data = data

    def _adopt_states(self) -> None:
        """Moves the optimizer's new states to their place: in a slot, or on the host."""
        if self.states is None or self.states.optimizer is None:
            return
        if self.on_host:
            self.states.adopt(self._tier.record(Key(self.stage, OPTIM)))
        else:
            self.states.adopt(self._arena.slot(OPTIM, self._slots[OPTIM]).bytes)

    def _unbind(self) -> None:
        for parameter, field in zip(self._moved, self.layout.fields, strict=True):
            self.point(parameter, absent(field, self._device))
        self._unbound = self._marks()

    def _marks(self) -> list[tuple[int, int]]:
        """Numbers that differ after a change of its parameters."""
        return [(parameter.data_ptr(), parameter._version) for parameter in self._moved]

    def _gather_gradients(self) -> None:
        """Moves gradients that autograd did not make, such as zeros of a reduction, to their place."""
        slot = self._slots.setdefault(WGRAD, self._slots[WEIGHTS])
        views = self.gradients.views(self._arena.slot(WGRAD, slot).bytes)
        for place, (parameter, view) in enumerate(zip(self.summed, views, strict=True)):
            if parameter.grad is not None:
                if parameter.grad.data_ptr() != view.data_ptr():
                    view.copy_(parameter.grad)
                self.reached.add(place)
