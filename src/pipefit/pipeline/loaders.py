"""The position in a loader: the batch that comes next, also after a checkpoint."""

from __future__ import annotations

import base64
import io
import json
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from pipefit.errors import DataError, PipefitError
from pipefit.spec.files import JsonObject


@dataclass
class _Pass:
    """A pass over a loader.

    Attributes:
        loader: its batches.
        epoch: number of earlier passes.
        batches: number of batches taken.
        order: state of the loader's generators before the pass, as JSON data.
        iterator: over the rest of the pass; None: not begun in this process.
    """

    loader: Any
    epoch: int = 0
    batches: int = 0
    order: Any = None
    iterator: Iterator[Any] | None = None

    def begin(self) -> Iterator[Any]:
        """The rest of the pass."""
        if _has_state(self.loader):
            return iter(self.loader)
        self.order = _packed(_state_of(self.loader))
        return _after(self.loader, self.batches)


class LoaderPosition:
    """The position of a training in its loader: a torch `DataLoader`, or batches with their own `state_dict`.

    Every `fit` with the same loader continues after the last batch trained on. Other iterables have no position.

    Args:
        seed: of the order of a loader that shuffles without its own generator.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._saved: JsonObject | None = None
        # At most one pass. It is freed separately: in a cycle of garbage its worker processes end only after seconds.
        self._current: list[_Pass] = []
        weakref.finalize(self, self._current.clear)

    def resume(self, state: JsonObject | None) -> None:
        """Sets the position that `state` returned; it is that of the next loader."""
        self._saved = state
        self._current.clear()

    def state(self) -> JsonObject | None:
        """Returns the position as JSON data; None: there was no loader yet."""
        if not self._current:
            return self._saved
        at = self._current[0]
        is_new = at.iterator is None or _has_state(at.loader)
        if is_new:
            state = _packed(_state_of(at.loader))
        else:
            state = at.order
        return {**_kind(at.loader), "epoch": at.epoch, "batches": at.batches, "state": state}

    @property
    def words(self) -> str:
        """The last batch taken, in words; "": there is no loader."""
        if self._current:
            at = self._current[0]
        else:
            at = None
        if at and at.batches:
            return f"batch {at.batches - 1} of epoch {at.epoch}, both counted from 0"
        return ""

    def batches(self, batches: Iterable[Any], endless: bool) -> Iterator[Any]:
        """The batches from the position on: the rest of an epoch, or of endless epochs.

        A `DataLoader` without a generator gets one, so that it shuffles alike on every rank.

        Raises:
            DataError: the position is one of another loader.
        """
        if self._take_up(batches):
            return self._from_here(endless)
        return iter(batches)

    def num_left(self, batches: Iterable[Any]) -> int | None:
        """Number of batches in the rest of the epoch; None: unknown."""
        number = number_of(batches)
        if number and self._take_up(batches):
            return number - self._current[0].batches % number
        return number

    def _take_up(self, batches: Any) -> bool:
        """Makes batches that have a position those of the current pass; returns whether they have one."""
        if not has_position(batches):
            return False
        if isinstance(batches, DataLoader):
            _seed(batches, self._seed)
        if not self._current or self._current[0].loader is not batches:
            at = _Pass(batches)
            if self._saved is not None:
                _restore(batches, self._saved)
                at.epoch = self._saved["epoch"]
                at.batches = self._saved["batches"]
            self._saved = None
            self._current[:] = [at]
        return True

    def _from_here(self, endless: bool) -> Iterator[Any]:
        at = self._current[0]
        while True:
            if at.iterator is None or not isinstance(at.loader, DataLoader):
                at.iterator = at.begin()
            before = at.batches
            for batch in at.iterator:
                at.batches += 1
                yield batch
            num_drawn = at.batches - before
            was_empty = at.batches == 0
            at.iterator = None
            at.batches = 0
            at.epoch += not was_empty
            if was_empty or (num_drawn and not endless):
                return


class _Rest:
    """A sampler whose first iteration skips some choices.

    Attributes:
        sampler: the whole sampler.
        skip: number of choices that are still to be skipped.
    """

    def __init__(self, sampler: Any, skip: int) -> None:
        self.sampler = sampler
        self.skip = skip

    def __iter__(self) -> Iterator[Any]:
        skip = self.skip
        self.skip = 0
        yield from islice(self.sampler, skip, None)


def _after(loader: DataLoader[Any], skip: int) -> Iterator[Any]:
    """A pass over a loader without its first batches, which are not loaded where a sampler chooses them."""
    if loader.batch_sampler is None:
        place = "sampler"
    else:
        place = "batch_sampler"
    if not skip or isinstance(loader.dataset, IterableDataset) or place not in vars(loader):
        return islice(iter(loader), skip, None)
    rest = _Rest(vars(loader)[place], skip)
    # torch refuses to set it, because workers and sampler must agree; here both see the same one.
    vars(loader)[place] = rest
    try:
        iterator = iter(loader)
        first = list(islice(iterator, 1))
    finally:
        vars(loader)[place] = rest.sampler
    # Persistent workers keep their first sampler, and have not used this one.
    if rest.skip:
        return islice(iterator, rest.skip - 1, None)
    return chain(first, iterator)


def has_position(batches: Iterable[Any]) -> bool:
    """Returns whether a training has a position in batches, so that it can continue there."""
    return isinstance(batches, DataLoader) or _has_state(batches)


def _has_state(batches: Any) -> bool:
    return hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")


def _sampler(loader: DataLoader[Any]) -> Any:
    """The sampler that draws random numbers; None: there is none."""
    samplers = (getattr(loader.batch_sampler, "sampler", None), loader.batch_sampler, loader.sampler)
    return next((sampler for sampler in samplers if hasattr(sampler, "generator")), None)


def _seed(loader: DataLoader[Any], seed: int) -> None:
    """Gives its own generator to a loader that would shuffle by torch's global one, which differs among ranks."""
    sampler = _sampler(loader)
    if sampler is not None and sampler.generator is None:
        sampler.generator = torch.Generator().manual_seed(seed)
    # Persistent workers are seeded once; with a separate generator this changes the order of no epoch.
    shared = sampler is not None and loader.generator is sampler.generator and loader.persistent_workers
    if loader.generator is None or shared:
        loader.generator = torch.Generator().manual_seed(seed)


def _generators(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The generators of the order and of the workers' seeds, each once."""
    found = (getattr(_sampler(loader), "generator", None), loader.generator)
    return list(dict.fromkeys(one for one in found if isinstance(one, torch.Generator)))


def _state_of(loader: Any) -> Any:
    """The loader's own state, or the states of its generators."""
    if _has_state(loader):
        return loader.state_dict()
    return [one.get_state() for one in _generators(loader)]


def _restore(loader: Any, saved: JsonObject) -> None:
    was = _in_words(saved)
    now = _in_words(_kind(loader))
    cure = "give the same loader, or start it again with fit(iter(loader), …)"
    if was != now:
        raise DataError(f"the checkpoint stands at batch {saved['batches']} of {was}, but fit was given {now}; {cure}")
    try:
        state = _unpacked(saved["state"])
        if _has_state(loader):
            loader.load_state_dict(state)
        else:
            for generator, own in zip(_generators(loader), state, strict=True):
                generator.set_state(own)
    except PipefitError:
        raise
    except Exception as problem:  # of any kind, for the loader is the user's
        kind = type(loader).__name__
        raise DataError(f"{kind} does not take the state in the checkpoint: {problem}; {cure}") from None


def _kind(loader: Any) -> JsonObject:
    return {"kind": type(loader).__name__, "length": number_of(loader)}


def _in_words(kind: JsonObject) -> str:
    return f"a {kind['kind']} of {kind['length'] or 'unknown'} batches"


def number_of(batches: Any) -> int | None:
    """Number of batches; None: unknown."""
    try:
        return len(batches)
    except TypeError:
        return None


def _packed(state: Any) -> Any:
    """A state as JSON data: unchanged, or the bytes of `torch.save`."""
    try:
        if json.loads(json.dumps(state)) == state:
            return state
    except TypeError:
        pass
    file = io.BytesIO()
    torch.save(state, file)
    return {"torch": base64.b64encode(file.getvalue()).decode()}


def _unpacked(state: Any) -> Any:
    if not isinstance(state, dict) or state.keys() != {"torch"}:
        return state
    return torch.load(io.BytesIO(base64.b64decode(state["torch"])), weights_only=True)
