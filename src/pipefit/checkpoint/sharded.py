"""Optimizers and weights that replicas share, made whole tensor by tensor while they are saved.

    replica 0    writes │ weight 0 │ weight 1 │ states of weight 0 │ ...
    replica 1    sends       ▲          ▲                ▲            its part of each

A checkpoint always has the same form: whole tensors under the user's names. The first replica of a stage writes them:
it gets the others' parts of a tensor, and lets it go before the next one. Of whole tensors that are read each replica
keeps its part.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipefit.errors import ModelError
from pipefit.parallel.buckets import in_order, view_in
from pipefit.parallel.shared_stores import SharedWeightsStore
from pipefit.parallel.weights import Store
from pipefit.runtime.collectives import agree, attempt, receive, send

if TYPE_CHECKING:
    from pipefit.checkpoint.trained import Trained
    from pipefit.runtime.worker import Worker

OPTIM = "optim/"
"""Prefix of the names of states in a file: "optim/<parameter>/<key>"."""


class _Whole(NamedTuple):
    """A tensor of which replicas have parts.

    Attributes:
        form: its shape and layout, on the meta device.
        places: first element and number of elements of each replica's part.
        values: the parts in this process, flat, by replica.
    """

    form: Tensor
    places: dict[int, tuple[int, int]]
    values: dict[int, Tensor]


_Wholes = dict[str, _Whole]
"""By the name in the file."""

_States = defaultdict[Tensor, dict[str, Any]]
"""Those of an optimizer, by parameter and key."""


class _StatePart(NamedTuple):
    """A part of an optimizer's state as the first replica gets to know it.

    Attributes:
        parameter: its place among those of the stage.
        key: of the state.
        replica: that has it.
        place: first element and number of elements.
        dtype: of the elements.
        counter: the whole state, where it is one number for all parts.
    """

    parameter: int
    key: str
    replica: int
    place: tuple[int, int]
    dtype: torch.dtype
    counter: Tensor | None


class Sharing:
    """The tensors of this process's stages of which replicas have parts, by stage and name in the file.

    All ranks must make one together.

    Args:
        pipeline: between two steps.

    Raises:
        ModelError: on every rank: a weight that is in parts was changed, and would be saved as it was.
    """

    def __init__(self, pipeline: Trained) -> None:
        if pipeline.program.header.spill is not None:
            pipeline.engine.check_weights()
        self._pipeline = pipeline
        self._ranks = pipeline.plan.placement.ranks
        self._found: dict[int, _Wholes] = defaultdict(dict)
        if pipeline.plan.shard == "weights":
            agree(pipeline.session, attempt(self._add_weights), ModelError)

    def whole(self, stage: int, name: str, value: Tensor) -> Tensor:
        """A tensor, whole, at the first replica of its stage; the given one where it is not in parts.

        The other replicas must `send` it. A weight is on the device of the given one, a state where it is made.
        """
        found = self._found[stage].get(name)
        if found is None:
            return value
        form = found.form
        flat = torch.empty(form.numel(), dtype=form.dtype, device=self._device)
        for replica, (start, length) in found.places.items():
            place = flat[start : start + length]
            if replica in found.values:
                place.copy_(found.values[replica])
            else:
                receive(self._pipeline.session, place, self._process(stage, replica))
        made = view_in(flat, 0, form)
        if not value.is_meta:
            made = made.to(value.device)
        return made

    def send(self, stage: int, names: Iterable[str]) -> None:
        """Sends this process's parts of weights of a stage to its first replica.

        Args:
            stage: of which this process has another replica, or none.
            names: in the order in which they are made whole there; those of other tensors are passed over.
        """
        own = self._found[stage]
        for name in names:
            if name in own:
                for values in own[name].values.values():
                    send(self._pipeline.session, values.to(self._device), self._process(stage, 0))

    def send_states(self, stage: int) -> None:
        """Sends this process's parts of all states of a stage to its first replica."""
        self.send(stage, [name for name in self._found[stage] if name.startswith(OPTIM)])

    @property
    def _device(self) -> torch.device:
        """The device on which tensors are made whole: the host's, where processes send parts."""
        if self._pipeline.session.is_distributed:
            return torch.device("cpu")
        return self._pipeline.engine.device

    def _process(self, stage: int, replica: int) -> int:
        """The process of a replica; those with the same part of a tensor-parallel stage belong together."""
        mesh = self._pipeline.engine.mesh
        rank = self._ranks[stage][replica]
        return mesh.process_of(rank) + mesh.index

    def _holders(self, stage: int) -> dict[int, Worker]:
        """The replicas of a stage that this process runs."""
        found = {}
        for worker in self._pipeline.workers:
            if stage in worker.stages:
                found[self._ranks[stage].index(worker.rank)] = worker
        return found

    def _add_weights(self) -> None:
        for stage, ranks in enumerate(self._ranks):
            for replica, worker in self._holders(stage).items():
                store = worker.stores[stage]
                if not isinstance(store, SharedWeightsStore):
                    break
                store.check_unchanged()
                for layer in worker.stages[stage].layers:
                    for name, weight in layer.module.named_parameters(prefix=layer.prefix, remove_duplicate=False):
                        home = store.home_of(weight)
                        if home is not None:
                            places = {other: home.part(other) for other in range(len(ranks))}
                            whole = _Whole(home.form, places, {})
                            found = self._found[stage].setdefault(name, whole)
                            found.values[replica] = store.part_of(weight)

    # ---- states ----------------------------------------------------------------------------------------------------

    def add_states(self, stage: int) -> list[tuple[Optimizer, Any]]:
        """Finds the states of a sharded optimizer; all processes with a replica must call it together.

        Returns:
            At the first replica (optimizer, its states): tensors of the meta device stand in for whole ones now.
        """
        holders = self._holders(stage)
        if not holders or any(stage not in worker.optimizers for worker in holders.values()):
            return []
        known = []
        values: dict[tuple[int, str], dict[int, Tensor]] = defaultdict(dict)
        for replica, worker in holders.items():
            for part, elements in _state_parts(worker, stage, replica):
                known.append(part)
                if part.counter is None:
                    values[part.parameter, part.key][replica] = elements
        if self._pipeline.session.is_distributed:
            known = self._known(stage, known, is_first=0 in holders)
        worker = next(iter(holders.values()))
        owned = worker.owned[stage]
        masters = worker.stores[stage].masters
        states = _whole_of_resident(worker, stage)
        for part in sorted(known, key=itemgetter(0, 1, 2)):
            master = masters[part.parameter]
            if part.counter is not None:
                states[master][part.key] = part.counter
                continue
            form = torch.empty_like(master, dtype=part.dtype, device="meta")
            states[master].setdefault(part.key, form)
            saved = owned[part.parameter].saved_name
            whole = _Whole(form, {}, values[part.parameter, part.key])
            found = self._found[stage].setdefault(f"{OPTIM}{saved}/{part.key}", whole)
            found.places[part.replica] = part.place
        if 0 not in holders:
            return []
        optimizer = holders[0].optimizers[stage]
        before = [(optimizer, optimizer.state)]
        optimizer.state = states
        return before

    def _known(self, stage: int, own: list[_StatePart], is_first: bool) -> list[_StatePart]:
        """The parts of all replicas, where this process has the first one; else its own."""
        host = torch.device("cpu")
        if not is_first:
            dist.send_object_list([own], self._process(stage, 0), device=host)
            return own
        every = list(own)
        for replica in range(1, len(self._ranks[stage])):
            box: list[Any] = [None]
            with self._pipeline.session.progress.waiting():
                dist.recv_object_list(box, self._process(stage, replica), device=host)
            every += box[0]
        return every


@contextlib.contextmanager
def whole_states(pipeline: Trained) -> Iterator[Sharing]:
    """The context in which a sharded stage's first replica knows whole states, which `Sharing.whole` makes.

    All ranks must enter together.

    Args:
        pipeline: between two steps.
    """
    sharing = Sharing(pipeline)
    own = []
    try:
        for stage in range(len(pipeline.plan.placement.ranks)):
            if pipeline.program.header.is_sharded(stage):
                own += sharing.add_states(stage)
        yield sharing
    finally:
        for optimizer, state in own:
            optimizer.state = state


def _state_parts(worker: Worker, stage: int, replica: int) -> Iterator[tuple[_StatePart, Tensor]]:
    """The states of a replica's pieces."""
    optimizer = worker.optimizers[stage]
    for piece in worker.stores[stage].pieces:
        for key, value in optimizer.state.get(piece.master, {}).items():
            if isinstance(value, Tensor):
                place = (piece.start, piece.stop - piece.start)
                counter = None
                if value.dim() == 0:
                    counter = value.detach().cpu()
                part = _StatePart(piece.index, key, replica, place, value.dtype, counter)
                yield part, value.detach()


def _whole_of_resident(worker: Worker, stage: int) -> _States:
    """The states of weights that are stepped whole."""
    known = worker.optimizers[stage].state
    states: _States = defaultdict(dict)
    for master in worker.stores[stage].masters:
        if master in known:
            states[master] = known[master]
    return states


def put_state(optimizer: Optimizer, store: Store, master: nn.Parameter, key: str, value: Any) -> None:
    """Sets a whole state of a parameter in an optimizer, of which a sharded one keeps its part."""
    index = next(index for index, one in enumerate(store.masters) if one is master)
    if store.steps_whole(index):
        optimizer.state[master][key] = value
        return
    for piece in store.pieces:
        if piece.index == index:
            own = _part_of(key, value, master, piece.start, piece.stop)
            optimizer.state[piece.master][key] = own


def _part_of(key: str, value: object, master: Tensor, start: int, stop: int) -> object:
    """A part of a state with the shape of its weight; counters stay."""
    if not isinstance(value, Tensor) or (value.dim() == 0 and (master.dim() or key == "step")):
        return value
    return in_order(value, master)[start:stop].clone()
