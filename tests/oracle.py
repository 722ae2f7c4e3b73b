"""A second opinion on programs: runs one on all ranks at once, with symbols for numbers.

It shares nothing with the verifier and nothing with the laws of `pipefit.ir` but the instructions themselves. Ranks
take turns in a random order; a send waits until its receive is posted (or not at all, if `eager`); messages find their
receives by tag, or by their order on the link. What comes out are the weights of every stage on every rank, as terms:
two programs with equal terms train the same model.
"""

import random
from collections import Counter

from pipefit.ir import Op, Program

WAIT = object()
WHOLE = {"act-piece": "act", "grad-piece": "grad"}


class BrokenProgramError(Exception):
    """The program crashes, hangs or leaves something behind."""


class Pending:
    """A buffer whose message has not come."""

    def __init__(self, link, tag):
        self.link, self.tag = link, tag


class Machine:
    def __init__(self, program: Program, seed: int = 0, tags: bool = True, eager: bool = False):
        self.header, self.lists = program.header, program.ranks
        self.replayed = {(i.stage, i.mb) for rank in program.ranks for i in rank if i.op is Op.RECOMPUTE}
        self.random, self.tags, self.eager = random.Random(seed), tags, eager
        size = len(program.ranks)
        self.at = [0] * size
        self.values = [{} for _ in range(size)]
        self.drawn = [set() for _ in range(size)]  # random numbers that a replay needs
        held = [[s for s, ranks in enumerate(self.header.placement) if r in ranks] for r in range(size)]
        self.weights = [{s: {0: ("w0", str(s))} for s in stages} for stages in held]
        self.optim = [{s: ("o0", str(s)) for s in stages} for stages in held]
        self.grads = [{s: self._no_gradients(s) for s in stages} for stages in held]
        self.norms = [{} for _ in range(size)]
        self.losses = Counter()
        self.open = {}  # link -> posted receives in order
        self.sent = {}  # link -> messages in order, on their way to a receive
        self.came = {}  # members -> rank -> the collective it is at
        self.terms = {}

    def term(self, *parts):
        """A short name for a term, equal for equal ones."""
        return self.terms.setdefault(parts, len(self.terms))

    def _no_gradients(self, stage):
        return {"own": Counter(), **{tie[0]: Counter() for tie in self.header.ties if stage in tie}}

    def run(self):
        """The result; raises BrokenProgramError."""
        ranks = list(range(len(self.lists)))
        going = True
        while going:
            going = False
            self.random.shuffle(ranks)
            for rank in ranks:
                for _ in range(self.random.choice((1, 1, 2, 5, 100))):
                    if self.at[rank] == len(self.lists[rank]) or not self._try(rank):
                        break
                    going = True
        if any(self.at[rank] < len(self.lists[rank]) for rank in ranks):
            raise BrokenProgramError("hang")
        if any(self.open.values()) or any(self.sent.values()):
            raise BrokenProgramError("messages left over")
        left = [[c for part in g.values() for c in part.items()] for rank in self.grads for g in rank.values()]
        if any(left):
            raise BrokenProgramError("gradients left over")
        if not all(self.is_complete(s, versions) for rank in self.weights for s, versions in rank.items()):
            raise BrokenProgramError("no weights left, or weights left over")
        newest = [
            {s: self.spell(self.result(rank, s, versions)) for s, versions in own.items()}
            for rank, own in enumerate(self.weights)
        ]
        return newest, sorted((self.spell(term), count) for term, count in self.losses.items())

    def is_complete(self, stage, versions):
        """Whether the weights of a stage are there, in the end, as its program promises."""
        return bool(versions)

    def result(self, rank, stage, versions):
        """What a stage's weights are in the end."""
        return versions[max(versions)]

    def spell(self, term):
        """A term in full, the same in every run: the hash of its parts."""
        if not hasattr(self, "_spelled"):
            self._spelled, self._parts = {}, {number: parts for parts, number in self.terms.items()}
        return self._spell(term)

    def _spell(self, term):
        if isinstance(term, tuple):
            return hash(tuple(self._spell(part) for part in term))
        if isinstance(term, frozenset):
            return hash(frozenset(self._spell(part) for part in term))
        if isinstance(term, int):
            if term not in self._spelled:
                parts = self._parts[term]
                self._spelled[term] = hash((parts[0], parts[1], *(self._spell(p) for p in parts[2:])))
            return self._spelled[term]
        return hash(term)

    def _try(self, rank):
        i = self.lists[rank][self.at[rank]]
        if i.op in (Op.REDUCE, Op.BARRIER, Op.UNSHARD):
            return self._collective(rank, i)
        try:
            if getattr(self, f"_{i.op.value}")(rank, i) is WAIT:
                return False
        except (KeyError, IndexError) as problem:
            raise BrokenProgramError(f"rank {rank}: {i}: {problem!r}") from None
        self.at[rank] += 1
        return True

    def _get(self, rank, *keys):
        found = [self.values[rank][key] for key in keys]
        return None if any(isinstance(value, Pending) for value in found) else found

    def _load(self, rank, i):
        self.values[rank]["input", i.stage, i.mb] = self.term("in", f"{i.stage}.{i.mb}")

    def _taken(self, i):
        return ("act", i.stage - 1, i.mb) if i.stage else ("input", 0, i.mb)

    def _fwd(self, rank, i):
        weights, taken = self.weights[rank][i.stage][i.version], self._get(rank, self._taken(i))
        if taken is None:
            return WAIT
        name = f"{i.stage}.{i.mb}"
        self.values[rank]["act", i.stage, i.mb] = self.term("f", name, weights, taken[0])
        self.drawn[rank].add((i.stage, i.mb))
        if (i.stage, i.mb) not in self.replayed:
            self.values[rank]["saved", i.stage, i.mb] = self.term("saved", name, weights, taken[0])

    def _recompute(self, rank, i):
        weights, taken = self.weights[rank][i.stage][i.version], self._get(rank, self._taken(i))
        if taken is None:
            return WAIT
        if (i.stage, i.mb) not in self.drawn[rank]:
            raise BrokenProgramError("a replay before its forward")
        self.values[rank]["saved", i.stage, i.mb] = self.term("saved", f"{i.stage}.{i.mb}", weights, taken[0])

    def _loss(self, rank, i):
        last = len(self.header.placement) - 1
        found = self._get(rank, ("act", last, i.mb), ("input", last, i.mb))
        if found is None:
            return WAIT
        self.values[rank]["grad", last, i.mb] = loss = self.term("loss", str(i.mb), *found)
        self.losses[loss] += 1

    def _bwd(self, rank, i):
        if self._bwd_input(rank, i) is WAIT:
            return WAIT
        self._bwd_weight(rank, i)

    def _bwd_input(self, rank, i):
        weights = self.weights[rank][i.stage][i.version]
        found = self._get(rank, ("saved", i.stage, i.mb), ("grad", i.stage, i.mb))
        if found is None:
            return WAIT
        del self.values[rank]["grad", i.stage, i.mb]
        self.values[rank]["half", i.stage, i.mb] = found[1]
        if i.stage:
            self.values[rank]["grad", i.stage - 1, i.mb] = self.term("gi", f"{i.stage}.{i.mb}", weights, *found)

    def _bwd_weight(self, rank, i):
        weights = self.weights[rank][i.stage][i.version]
        saved, half = (self.values[rank].pop((kind, i.stage, i.mb)) for kind in ("saved", "half"))
        gradient = self.term("gw", f"{i.stage}.{i.mb}", weights, saved, half)
        for part in self.grads[rank][i.stage].values():  # like .grad: whatever comes before a step is in it
            part[gradient] += 1

    def _step(self, rank, i):
        weights = self.weights[rank][i.stage]
        norm = self.norms[rank][i.version] if self.header.clip else ""
        gradients = self._frozen(self.grads[rank][i.stage])
        state = self.optim[rank][i.stage] = self.term("o", str(i.stage), self.optim[rank][i.stage], gradients, norm)
        weights[i.version + 1] = self.term("w", f"{i.stage}.{i.version}", weights[i.version], state)
        self.grads[rank][i.stage] = self._no_gradients(i.stage)

    def _frozen(self, gradients):
        return frozenset((str(part), g, str(n)) for part, counts in gradients.items() for g, n in counts.items())

    def _drop(self, rank, i):
        del self.weights[rank][i.stage][i.version]

    def _recv(self, rank, i):
        pending = Pending((i.peer, rank), (i.kind, i.stage, i.mb))
        self.values[rank][pending.tag] = pending
        self.open.setdefault(pending.link, []).append(pending)
        self._deliver(pending.link)

    def _send(self, rank, i):
        tag, link = (i.kind, i.stage, i.mb), (rank, i.peer)
        found = self._get(rank, (WHOLE.get(i.kind, i.kind), i.stage, i.mb))
        if found is None:
            return WAIT
        self.sent.setdefault(link, []).append((tag, found[0]))
        self._deliver(link)
        if not self.eager and self.sent[link]:
            self.sent[link].pop()
            return WAIT

    def _gather(self, rank, i):
        found = self._get(rank, (f"{i.kind}-piece", i.stage, i.mb))
        if found is None:
            return WAIT
        self.values[rank][i.kind, i.stage, i.mb] = found[0]

    def _deliver(self, link):
        """Hands messages to the receives that are theirs, by tag or by order."""
        sent, posted = self.sent.get(link, []), self.open.get(link, [])
        for message in list(sent):
            tag, value = message
            mine = [p for p in posted if p.tag == tag] if self.tags else posted
            if not mine:
                continue
            pending = mine[0]
            sent.remove(message)
            posted.remove(pending)
            if self.values[link[1]].get(pending.tag) is pending:
                self.values[link[1]][pending.tag] = value

    def _members(self, i):
        placement = self.header.placement
        if i.op is Op.BARRIER or i.kind == "norm":
            return tuple(range(len(self.lists)))
        if i.kind == "tied":
            (tie,) = [tie for tie in self.header.ties if tie[0] == i.stage] or [()]
            return tuple(sorted({rank for stage in tie for rank in placement[stage]}))
        return tuple(sorted(placement[i.stage])) if 0 <= i.stage < len(placement) else ()

    def _collective(self, rank, i):
        members = self._members(i)
        if rank not in members:
            raise BrokenProgramError(f"rank {rank} is no member of {i}")
        came = self.came.setdefault(members, {})
        came[rank] = i
        if len(came) < len(members):
            return False
        if len(set(came.values())) > 1:
            raise BrokenProgramError("members come to different collectives")
        self.came[members] = {}
        self._reduce(members, i)
        for member in members:
            self.at[member] += 1
        return True

    def _reduce(self, members, i):
        if i.op is Op.BARRIER:
            return
        if i.kind == "norm":
            trained = ((r, s, g) for r in members for s, g in self.grads[r].items() if s >= self.header.frozen)
            everything = frozenset((str((r, s)), self._frozen(g)) for r, s, g in trained)
            for rank in members:
                self.norms[rank][i.version] = self.term("norm", str(i.version), everything)
            return
        part = "own" if i.kind == "replicas" else i.stage
        parts = [g for r in members for s, g in self.grads[r].items() if (part in g if part != "own" else s == i.stage)]
        total = sum((g[part] for g in parts), Counter())
        for gradients in parts:
            gradients[part] = Counter(total)


def outcome(program: Program, seed: int = 0, tags: bool = True, eager: bool = False):
    """The weights a program trains, as terms.

    Raises:
        BrokenProgramError: it crashes, hangs or leaves something behind.
    """
    if program.header.spill:
        from tests.oracle_spill import SpillingMachine

        return SpillingMachine(program, seed, tags, eager).run()
    if program.header.shard != "none":
        from tests.oracle_sharing import SharingMachine

        return SharingMachine(program, seed, tags, eager).run()
    return Machine(program, seed, tags, eager).run()


def difference(p: Program, q: Program, adversaries, run=outcome) -> str:
    """What a program does that another does not, in the eyes of every adversary; "" if nothing."""
    wanted = run(p)
    for adversary in adversaries:
        try:
            if run(q, **adversary) != wanted:
                return f"another result under {adversary}"
        except BrokenProgramError as problem:
            return f"{problem} under {adversary}"
    return ""
