"""The second opinion on programs whose replicas share the optimizer's work, gradients or weights."""

from collections import Counter

from pipefit.ir import Op
from tests.oracle import BrokenProgramError, Machine


class SharingMachine(Machine):
    """Shards are terms of whole weights: a step changes them, and a gather makes weights of them."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.shared = [s for s, ranks in enumerate(self.header.placement) if len(ranks) > 1]
        self.gathers = self.shared if self.header.shard == "weights" else []
        self.frees = self.shared if self.header.shard != "optimizer" else []
        self.shards = [{s: own[s].pop(0) for s in self.gathers if s in own} for own in self.weights]
        self.stepped = [{} for _ in self.weights]
        self.sums = [{s: Counter() for s in self.frees if s in own} for own in self.weights]

    def run(self):
        weights, losses = super().run()
        if any(part for own in self.sums for part in own.values()):
            raise BrokenProgramError("sums left over")
        if any(self.stepped):
            raise BrokenProgramError("shards that were never joined")
        return weights, losses

    def is_complete(self, stage, versions):
        return bool(versions) != (stage in self.gathers)

    def result(self, rank, stage, versions):
        return self.shards[rank][stage] if stage in self.gathers else super().result(rank, stage, versions)

    def _step(self, rank, i):
        if i.stage not in self.shared:
            super()._step(rank, i)
            return
        if i.stage in self.frees:
            if self.grads[rank][i.stage]["own"]:
                raise BrokenProgramError("a step while whole gradients are there")
            self.grads[rank][i.stage]["own"] = self.sums[rank][i.stage]
            self.sums[rank][i.stage] = Counter()
        if i.stage in self.gathers:
            if self.weights[rank][i.stage]:
                raise BrokenProgramError("a step while its whole weights are there")
            self.weights[rank][i.stage][i.version] = self.shards[rank][i.stage]
        super()._step(rank, i)
        new = self.weights[rank][i.stage].pop(i.version + 1)
        if i.stage in self.gathers:
            del self.weights[rank][i.stage][i.version]
            self.shards[rank][i.stage] = new
        else:
            self.stepped[rank][i.stage, i.version] = new

    def _free(self, rank, i):
        if not self.grads[rank][i.stage]["own"]:
            raise BrokenProgramError("nothing to free")
        self.grads[rank][i.stage]["own"] = Counter()

    def _reduce(self, members, i):
        if i.op is Op.UNSHARD:
            whole = self._joined([self.shards[rank][i.stage] for rank in members])
            for rank in members:
                if self.weights[rank][i.stage]:
                    raise BrokenProgramError("gathered twice")
                self.weights[rank][i.stage][i.version] = whole
        elif i.kind == "shards":
            self._join_stepped(members, i)
        elif i.kind == "scatter" and i.stage in self.shared:
            total = sum((self.grads[rank][i.stage]["own"] for rank in members), Counter())
            for rank in members:
                if i.stage in self.frees:
                    self.sums[rank][i.stage] += total
                else:
                    self.grads[rank][i.stage]["own"] = Counter(total)
        elif i.kind == "norm":
            whole = [dict(own) for own in self.grads]
            for rank in members:
                for stage in self.sums[rank]:
                    self.grads[rank][stage] = {**whole[rank][stage], "own": self.sums[rank][stage]}
            super()._reduce(members, i)
            self.grads = whole
        else:
            super()._reduce(members, i)

    def _join_stepped(self, members, i):
        key = i.stage, i.version
        if any(key not in self.stepped[rank] for rank in members):
            raise BrokenProgramError(f"{i}: its shards are not stepped")
        new = self._joined([self.stepped[rank].pop(key) for rank in members])
        for rank in members:
            self.weights[rank][i.stage][i.version + 1] = new

    def _joined(self, shards):
        """Whole weights of the shards of all replicas, which are the same where these have stepped alike."""
        if len(set(shards)) == 1:
            return shards[0]
        return self.term("mix", "", *shards)
