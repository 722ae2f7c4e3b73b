"""The second opinion on programs that spill: slots are cells that copies overwrite, whenever they please.

A copy is issued and happens at some later moment, chosen at random. It waits for three things only: an earlier
eviction of the very record it reads, an earlier eviction from the slot it fills, and (gradients) the weights of the
slot. An instruction waits for the fetches of what it uses. What a slot holds when it is read is what counts, whoever
put it there; what autograd keeps is a view of a slot, and worthless once the slot was filled anew.
"""

from collections import Counter

from pipefit.ir import Program
from tests.oracle import BrokenProgramError, Machine


class Copy:
    """A copy under way."""

    def __init__(self, rank, i, slot, waits):
        self.rank, self.i, self.slot, self.waits, self.done = rank, i, slot, waits, False


class Seat:
    """The versions of a stage's weights, as the machine asks for them: one at most, in whatever slot it sits."""

    def __init__(self, machine, rank, stage):
        self.machine, self.rank, self.stage = machine, rank, stage

    def __getitem__(self, version):
        return self.machine.read(self.rank, "weights", self.stage, version)

    def __setitem__(self, version, term):
        self.machine.write(self.rank, "weights", self.stage, version, term)

    def __delitem__(self, version):
        self[version]
        del self.machine.home[self.rank]["weights", self.stage]

    def __bool__(self):
        return True


class SpillingMachine(Machine):
    pace = 0.4  # how readily a copy happens by itself

    def __init__(self, program: Program, seed: int = 0, tags: bool = True, eager: bool = False):
        super().__init__(program, seed, tags, eager)
        self.spill = self.header.spill
        size = len(program.ranks)
        self.cells, self.home, self.parts = ([{} for _ in range(size)] for _ in range(3))
        self.twin, self.filled = ([{} for _ in range(size)] for _ in range(2))
        self.tier = [{} for _ in range(size)]
        self.copies = [[] for _ in range(size)]
        for rank in range(size):
            for stage in self.spilled(rank):
                self.tier[rank]["weights", stage] = 0, self.weights[rank][stage][0]
                self.weights[rank][stage] = Seat(self, rank, stage)
                if self.moves_states(stage):
                    self.tier[rank]["optim", stage] = 0, self.optim[rank].pop(stage)

    def moves_states(self, stage):
        return self.spill.optim_slots > 0 and stage not in self.spill.on_host

    def spilled(self, rank):
        return [s for s, ranks in enumerate(self.header.placement) if rank in ranks and s in self.spill.stages]

    # ---------------------------------------------------------------------------------------------------------- slots

    def read(self, rank, kind, stage, version):
        slot = self.home[rank][kind, stage]
        self._await(rank, kind, stage)
        whose, at, term = self.cells[rank][kind, slot]
        if (whose, at) != (stage, version):
            raise BrokenProgramError(f"slot {slot} has {kind} of stage {whose}, version {at}: not {stage}, {version}")
        return term

    def write(self, rank, kind, stage, version, term):
        self.cells[rank][kind, self.home[rank][kind, stage]] = stage, version, term

    def _await(self, rank, kind, stage):
        for copy in [c for c in self.copies[rank] if c.i.op == "fetch" and (c.i.kind, c.i.stage) == (kind, stage)]:
            self._happen(copy)

    def _happen(self, copy):
        if copy.done:
            return
        for other in copy.waits:
            self._happen(other)
        copy.done = True
        self.copies[copy.rank].remove(copy)
        if copy.i.op == "fetch":
            self._fetched(copy.rank, copy.i)
        elif copy.i.op == "host_step":
            self._stepped(copy.rank, copy.i)
        else:
            self._evicted(copy.rank, copy.i, copy.slot)

    def _fetched(self, rank, i):
        version, content = self.tier[rank][i.kind, i.stage]
        if version != i.version:
            raise BrokenProgramError(f"{i}: the tier has {version}")
        if i.kind == "wgrad":
            if self.home[rank].get(("weights", i.stage)) != i.slot:
                raise BrokenProgramError(f"{i}: its weights are elsewhere")
            self.grads[rank][i.stage] = {part: Counter(counts) for part, counts in content.items()}
            self.twin[rank][i.stage] = i.slot
            del self.tier[rank][i.kind, i.stage]
            return
        self.cells[rank][i.kind, i.slot] = i.stage, i.version, content
        if i.kind == "weights":
            self.filled[rank][i.slot] = self.filled[rank].get(i.slot, 0) + 1
            for stage in [s for s, slot in self.twin[rank].items() if slot == i.slot]:
                del self.twin[rank][stage]
                self.grads[rank][stage] = self._no_gradients(stage)

    def _evicted(self, rank, i, slot):
        if i.kind == "wgrad":
            content = self.grads[rank][i.stage]
            self.grads[rank][i.stage] = self._no_gradients(i.stage)
            self.twin[rank].pop(i.stage, None)
        else:
            whose, version, content = self.cells[rank][i.kind, slot]
            if (whose, version) != (i.stage, i.version):
                raise BrokenProgramError(f"{i}: the slot holds stage {whose}, version {version}")
        self.tier[rank][i.kind, i.stage] = i.version, content

    # --------------------------------------------------------------------------------------------------- instructions

    def _try(self, rank):
        while self.copies[rank] and self.random.random() < self.pace:
            self._safely(rank, self.random.choice(self.copies[rank]))
        going = super()._try(rank)
        if self.at[rank] == len(self.lists[rank]):
            while self.copies[rank]:
                self._safely(rank, self.copies[rank][0])
        return going

    def _safely(self, rank, copy):
        try:
            self._happen(copy)
        except KeyError as problem:
            raise BrokenProgramError(f"rank {rank}: {copy.i}: {problem!r}") from None

    def _fetch(self, rank, i):
        if i.kind in ("act", "input"):
            self.values[rank][i.kind, i.stage, i.version] = self.tier[rank][i.kind, i.stage, i.version]
            return
        spaces = ("weights", "wgrad") if i.kind == "weights" else (i.kind,)
        mine = [
            c
            for c in self.copies[rank]
            if (c.i.op == "evict" and c.slot == i.slot and c.i.kind in spaces)
            or (c.i.op == "evict" and (c.i.kind, c.i.stage) == (i.kind, i.stage))
            or (c.i.op == "host_step" and ("weights", c.i.stage) == (i.kind, i.stage))
            or (i.kind == "wgrad" and c.i.op == "fetch" and c.i.kind == "weights" and c.slot == i.slot)
        ]
        if i.kind != "wgrad":
            self.home[rank][i.kind, i.stage] = i.slot
        self.copies[rank].append(Copy(rank, i, i.slot, mine))

    def _evict(self, rank, i):
        if i.kind in ("act", "input"):
            self.tier[rank][i.kind, i.stage, i.version] = self.values[rank].pop((i.kind, i.stage, i.version))
            return
        where = "weights" if i.kind == "wgrad" else i.kind
        if ("weights", i.stage) not in self.home[rank] and i.kind == "wgrad":
            raise BrokenProgramError(f"{i}: its gradients lie next to weights that are gone")
        slot = self.twin[rank][i.stage] if i.kind == "wgrad" else self.home[rank][i.kind, i.stage]
        mine = [c for c in self.copies[rank] if (c.i.kind, c.i.stage) == (i.kind, i.stage)]
        if i.kind == where:
            del self.home[rank][i.kind, i.stage]
        self.copies[rank].append(Copy(rank, i, slot, mine))

    def _keep(self, rank, i):
        """What autograd keeps of a forward is a view of the slot as it is filled now, unless it is told apart."""
        views = i.stage in self.spill.stages and i.stage not in self.spill.keeps
        if ("saved", i.stage, i.mb) in self.values[rank] and views:
            slot = self.home[rank]["weights", i.stage]
            self.values[rank]["view", i.stage, i.mb] = slot, self.filled[rank][slot]

    def _fwd(self, rank, i):
        result = super()._fwd(rank, i)
        self._keep(rank, i)
        return result

    def _recompute(self, rank, i):
        result = super()._recompute(rank, i)
        self._keep(rank, i)
        return result

    def _bwd_input(self, rank, i):
        if ("view", i.stage, i.mb) in self.values[rank]:
            slot, filled = self.values[rank]["view", i.stage, i.mb]
            if self.home[rank].get(("weights", i.stage)) != slot or self.filled[rank][slot] != filled:
                raise BrokenProgramError(f"{i}: what autograd kept lay in a slot that was filled anew")
        return super()._bwd_input(rank, i)

    def _bwd_weight(self, rank, i):
        if i.stage in self.spill.stages:
            self._await(rank, "wgrad", i.stage)
            self.twin[rank][i.stage] = self.home[rank]["weights", i.stage]
        super()._bwd_weight(rank, i)

    def _step(self, rank, i):
        if i.stage not in self.spill.stages:
            return super()._step(rank, i)
        self._await(rank, "wgrad", i.stage)
        if self.moves_states(i.stage):
            self.optim[rank][i.stage] = self.read(rank, "optim", i.stage, i.version)
        super()._step(rank, i)
        if self.moves_states(i.stage):
            self.write(rank, "optim", i.stage, i.version + 1, self.optim[rank].pop(i.stage))

    def _host_step(self, rank, i):
        mine = [c for c in self.copies[rank] if c.i.stage == i.stage and (c.i.op, c.i.kind) != ("fetch", "optim")]
        if self.header.clip:
            self.norms[rank][i.version]  # known before it is asked for
        self.copies[rank].append(Copy(rank, i, -1, mine))

    def _stepped(self, rank, i):
        version, weights = self.tier[rank]["weights", i.stage]
        update, content = self.tier[rank].pop(("wgrad", i.stage))
        if (version, update) != (i.version, i.version):
            raise BrokenProgramError(f"{i}: the host has weights {version} and gradients {update}")
        norm = self.norms[rank][i.version] if self.header.clip else ""
        state = self.optim[rank][i.stage]
        state = self.optim[rank][i.stage] = self.term("o", str(i.stage), state, self._frozen(content), norm)
        self.tier[rank]["weights", i.stage] = version + 1, self.term("w", f"{i.stage}.{i.version}", weights, state)

    def _members(self, i):
        return tuple(self.header.placement[i.stage]) if i.kind == "norm" and i.stage >= 0 else super()._members(i)

    def _reduce(self, members, i):
        for rank in members:
            for stage in self.spilled(rank):
                if i.kind != "norm" or stage == i.stage:
                    self._await(rank, "wgrad", stage)
        if i.kind != "norm":
            return super()._reduce(members, i)
        if i.stage >= 0:
            for rank in members:
                self.parts[rank][i.stage, i.version] = self._frozen(self.grads[rank][i.stage])
            return None
        everything = frozenset(
            (str((r, s)), self.parts[r].get((s, i.version), "none") if s in self.spilled(r) else self._frozen(g))
            for r in members
            for s, g in self.grads[r].items()
            if s >= self.header.frozen
        )
        for rank in members:
            self.norms[rank][i.version] = self.term("norm", str(i.version), everything)
        return None

    def result(self, rank, stage, versions):
        if stage not in self.spilled(rank):
            return super().result(rank, stage, versions)
        if any((kind, stage) in self.home[rank] for kind in ("weights", "optim")) or (
            ("wgrad", stage) in self.tier[rank]
        ):
            raise BrokenProgramError(f"stage {stage} is not home, or half a sum is left")
        return self.tier[rank]["weights", stage][1]
