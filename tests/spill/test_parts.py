"""The parts of spilling: optimizer states found out beforehand, weights drawn layer by layer, and rates."""

import time
from types import SimpleNamespace

import pytest
import torch
from tests.pipelines import grouped
from torch import nn

from pipefit import Pipeline, Spilled
from pipefit.errors import ModelError, PlanError
from pipefit.ir import Op
from pipefit.ir.residency import kept_fetches
from pipefit.profiling import measure_tier
from pipefit.profiling import tier_rates as tiers
from pipefit.spec.options import Parallelism, Updates
from pipefit.spill import optimizer_states as states
from pipefit.spill.arena import Slot, aligned
from pipefit.spill.lanes import Copy, Lanes
from pipefit.spill.optimizer_states import is_zero_at_first, numbers_outside, probe_states
from pipefit.spill.stage_store import SpilledStore
from pipefit.spill.tier_file import read_commits, record_sum
from pipefit.spill.tier_store import TierStore
from pipefit.spill.tiers import Key
from pipefit.stage.materialise import can_be_drawn, materialise
from pipefit.stage.record_layout import Layout, absent
from pipefit.stage.split import named_layers


def keys(optimizer):
    shapes = [torch.empty(6, 4, device="meta"), torch.empty(4, device="meta")]
    return {(s.parameter, s.key, tuple(s.like.shape)) for s in probe_states(optimizer, shapes, torch.device("cpu"))}


def test_states_are_found_out_without_memory():
    assert keys(lambda p: torch.optim.SGD(p, 0.1)) == set()
    assert keys(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)) == {
        (0, "momentum_buffer", (6, 4)),
        (1, "momentum_buffer", (4,)),
    }
    adam = keys(lambda p: torch.optim.Adam(p))
    assert {(0, "exp_avg", (6, 4)), (1, "exp_avg_sq", (4,)), (1, "step", ())} < adam and len(adam) == 6
    assert (0, "row_var", (6, 1)) in keys(lambda p: torch.optim.Adafactor(p))


@pytest.mark.parametrize(
    ("optimizer", "zero"),
    [
        (lambda p: torch.optim.Adam(p, 0.01), True),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), True),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5), False),
        (lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1), False),
    ],
)
def test_whether_zeros_are_as_good_as_no_state_is_found_by_trying(optimizer, zero):
    assert is_zero_at_first(optimizer) is zero


def test_a_record_holds_tensors_of_any_type_without_overlap():
    tensors = [torch.randn(3, 5), torch.tensor(7), torch.randn(2, dtype=torch.float64), torch.randn(4).bfloat16()]
    layout = Layout(tensors)
    record = aligned(layout.num_bytes)
    for view, tensor in zip(layout.views(record), tensors, strict=True):
        view.copy_(tensor)
    assert all(torch.equal(view, tensor) for view, tensor in zip(layout.views(record), tensors, strict=True))
    assert layout.num_bytes % 4096 == 0 and record.data_ptr() % 4096 == 0


def test_what_stands_for_an_absent_tensor_takes_no_memory_and_is_nan():
    stand_in = absent(Layout([torch.randn(1000, 1000)]).fields[0], torch.device("cpu"))
    assert stand_in.shape == (1000, 1000) and stand_in.untyped_storage().nbytes() == 4 and stand_in.isnan().all()


def test_a_copy_fails_with_the_copy_that_it_waits_for():
    lanes = Lanes()
    first = lanes.write.submit(lambda: 1 / 0)
    second = lanes.read.submit(lambda: None, [first])
    with pytest.raises(ZeroDivisionError):
        second.wait()
    lanes.close()


def test_a_slot_is_waited_for_until_its_copies_have_ended():
    slot, copy = Slot(torch.empty(4096, dtype=torch.uint8)), Copy()
    slot.busy.append(copy)
    assert slot.taken() == (copy,) and slot.taken() == ()


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


def test_a_layer_that_cannot_draw_its_weights_is_named():
    with torch.device("meta"):
        layers = named_layers([nn.Linear(2, 2), Own()])
    assert not can_be_drawn(layers)
    with pytest.raises(ModelError, match=r"1 \(Own\) was built on the meta device and has no reset_parameters"):
        materialise(layers, 0, torch.device("cpu"))


def test_weights_depend_on_the_seed_and_the_place_of_their_layer():
    def drawn(seed, count=3):
        with torch.device("meta"):
            layers = named_layers([nn.Linear(2, 2) for _ in range(count)])
        materialise(layers, seed, torch.device("cpu"))
        return [layer.module.weight.detach() for layer in layers]

    assert all(map(torch.equal, drawn(1), drawn(1, count=5)))
    assert not torch.equal(drawn(1)[0], drawn(2)[0])
    assert not torch.equal(drawn(1)[0], drawn(1)[1])


@pytest.mark.parametrize(
    "options", [{}, {"spill": Spilled(), "parallelism": Parallelism(chunks=2)}], ids=["resident", "spilled"]
)
def test_ties_of_a_model_without_memory_are_refused(options):
    with torch.device("meta"):
        first, last = nn.Linear(4, 4), nn.Linear(4, 4)
        last.weight = first.weight
    with pytest.raises(ModelError, match="untie them"):
        Pipeline(
            [first, last],
            loss=nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.SGD(p, 0.1),
            stages=2,
            **options,
        )


@pytest.mark.slow
def test_a_plan_that_spills_to_disk_asks_for_a_folder():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    x = torch.zeros(8, 64)
    more = {"loss": nn.functional.mse_loss, "optimizer": lambda p: torch.optim.Adam(p), "microbatches": 2}
    host = Pipeline(model, **grouped(example=(x, x), spill=Spilled("300 KiB"), **more))
    plan = host.plan
    told = plan.spill.__class__(tier="disk", device_bytes=plan.spill.device_bytes)
    host.close()
    with pytest.raises(PlanError, match="name a folder by --disk FOLDER"):
        Pipeline(
            nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))),
            **grouped(plan=plan.__class__(**_fields(plan, told)), **more),
        )


def _fields(plan, spill):
    return {name: getattr(plan, name) for name in plan.__struct_fields__} | {"spill": spill}


def test_a_tier_is_measured_with_the_copies_of_spilling(tmp_path):
    for folder in (None, tmp_path):
        tier = measure_tier(folder, num_bytes=1 << 20, repeats=2)
        assert tier.read_bytes_per_s > 1e6 and tier.write_bytes_per_s > 1e6
        # Whoever computes takes the checksums of a disk, and none of memory.
        assert tier.check_bytes_per_s > 1e6 if folder else tier.check_bytes_per_s == 0
    assert not list(tmp_path.iterdir())


def test_a_disk_that_has_little_room_is_measured_with_less(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(tiers.shutil, "disk_usage", lambda _: SimpleNamespace(free=3 << 20))
    monkeypatch.setattr(tiers, "_turn", lambda tier, *_: asked.append(tier.disk_bytes) or (1.0, 1.0, 1.0))
    measure_tier(tmp_path, repeats=2)
    assert 1 << 20 < asked[0] < 2 << 20


@pytest.mark.parametrize(("both_s", "one_channel"), [(1.9, True), (1.1, False)])
def test_a_tier_whose_reads_and_writes_take_turns_is_known_by_both_at_once(monkeypatch, both_s, one_channel):
    monkeypatch.setattr(tiers, "_turn", lambda *_: (1.0, 0.8, both_s))
    tier = measure_tier(num_bytes=4096, repeats=3)
    assert tier.one_channel is one_channel and (tier.read_bytes_per_s, tier.write_bytes_per_s) == (4096, 5120)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(("stages", "slots"), [(1, 1), (3, 1), (4, 2), (5, 3)])
def test_the_run_reads_what_the_limit_and_the_simulation_say_it_reads(tmp_path, monkeypatch, stages, slots, clip):
    copied, were_read = [], []
    fetch, read = SpilledStore.fetch, TierStore.read

    def fetching(self, kind, *where):
        before = len(were_read)
        copy = fetch(self, kind, *where)
        copied.append((kind, len(were_read) > before))
        return copy

    monkeypatch.setattr(SpilledStore, "fetch", fetching)
    monkeypatch.setattr(TierStore, "read", lambda *what: (were_read.append(what), read(*what))[1])
    pipe = Pipeline(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(stages))),
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.Adam(p, 0.1),
        stages=stages,
        spill=Spilled(disk=tmp_path, slots=slots),
        parallelism=Parallelism(chunks=stages),
        updates=Updates(clip_norm=clip),
    )
    fetches = [(index, i) for index, i in enumerate(pipe.program.ranks[0]) if i.op is Op.FETCH]
    for step in range(3):
        copied.clear()
        pipe.step(torch.ones(4, 8), torch.ones(4, 8))
        assert [kind for kind, _ in copied] == [i.kind for _, i in fetches]
        were_there = [index for (index, _), (_, is_read) in zip(fetches, copied, strict=True) if not is_read]
        still = {index for index in were_there if pipe.program.ranks[0][index].kind == "weights"}
        assert still == kept_fetches(pipe.program, 0, later=step > 0)
        # Under clipping the stages come again, and end in other slots than those that they begin in.
        assert clip or bool(still) == (step > 0)
    told = str(pipe.report())
    assert "fetch s0" in told and "evict s0" in told
    pipe.close()


@pytest.mark.parametrize("stages", [2, 4])
def test_weights_that_are_still_in_their_slots_are_not_read_again_and_not_stepped_while_written(tmp_path, stages):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(stages)))
    pipe = Pipeline(
        model,
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.Adam(p, 0.1),
        stages=stages,
        spill=Spilled(disk=tmp_path, slots=2, optim_slots=0),
        parallelism=Parallelism(chunks=stages),
    )
    spilling = pipe.workers[0].spilling
    read, load = [], spilling.tier.read
    spilling.tier.read = lambda key, *more: read.append(str(key)) or load(key, *more)
    write = spilling.tier.files.write
    spilling.tier.files.write = lambda *what: (time.sleep(0.02), write(*what))
    x = torch.randn(8, 64)
    pipe.step(x, x)
    first, _ = list(read), read.clear()
    pipe.step(x, x)
    again = ["weights of stage 0", "weights of stage 1"]
    assert [key for key in read if "weights" in key] == [key for key in first if "weights" in key][2:]
    assert [key for key in first if "weights" in key][:2] == again
    spilling.settle()
    assert_whole(tmp_path, [Key(stage, "weights") for stage in range(stages)])
    pipe.close()


def assert_whole(folder, keys):
    """What was written fits its checksum, the version before too."""
    content = (folder / "rank-0.tier").read_bytes()
    commits = read_commits(folder, "rank-0")
    copies = {(key, commit.records[key].copy) for commit in commits for key in keys}
    assert len(copies) == 2 * len(keys)
    for commit in commits:
        for key in keys:
            at = commit.records[key]
            data = content[at.position(at.copy) : at.position(at.copy + 1)]
            assert at.checksum == record_sum(memoryview(data), f"{commit.tier}: {key}, version {at.version}")


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_states_that_are_still_in_their_slots_are_not_stepped_while_they_are_written(tmp_path, stages):
    pipe = Pipeline(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(stages))),
        loss=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.Adam(p, 0.1),
        stages=stages,
        spill=Spilled(disk=tmp_path, slots=2, optim_slots=2),
        parallelism=Parallelism(chunks=stages),
    )
    tier = pipe.workers[0].spilling.tier
    write = tier.files.write
    tier.files.write = lambda *what: (time.sleep(0.05), write(*what))
    for _ in range(3):
        pipe.step(torch.ones(8, 64), torch.ones(8, 64))
    pipe.settle()
    assert_whole(tmp_path, [Key(stage, "optim") for stage in range(stages)])
    pipe.close()


def beside_a_gpu(monkeypatch):
    """An optimizer's single numbers stay out of the records, as they do beside a GPU; trials are made on the CPU."""

    def on_the_cpu(make):
        with monkeypatch.context() as trial:
            trial.setattr(states, "_moves", moves)
            return is_zero_at_first(make)

    moves = states._moves
    monkeypatch.setattr(states, "_moves", lambda value, device: value.dim() > 0)
    monkeypatch.setattr("pipefit.spill.optimizer_states.is_zero_at_first", on_the_cpu)


@pytest.mark.parametrize("host", [(), (0, 2)])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad])
def test_an_optimizer_whose_count_of_steps_stays_beside_the_records_trains_alike(make, host, monkeypatch):
    """Adam on a GPU: it found the states that were put into its slot, made no count of steps, and missed it."""
    beside_a_gpu(monkeypatch)
    x, y = torch.randn(6, 8), torch.randn(6, 8)

    def trained(**more):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(4)]
        pipe = Pipeline(
            layers,
            **grouped(
                loss=nn.functional.mse_loss, optimizer=lambda p: make(p, 0.01), microbatches=2, clip_norm=0.5, **more
            ),
        )
        losses = [pipe.step(x, y) for _ in range(4)]
        weights = pipe.state_dict()
        pipe.close()
        return losses, weights

    alone = trained(stages=1)
    spilled = trained(stages=4, chunks=4, spill=Spilled(step_on=host or "device"))
    assert alone[0] == spilled[0] and all(torch.equal(alone[1][name], spilled[1][name]) for name in alone[1])


def test_numbers_that_stay_beside_the_records_are_those_that_the_optimizer_makes(monkeypatch):
    cpu = torch.device("cpu")
    assert numbers_outside(torch.optim.Adam, cpu) == {}, "on a CPU they are in the records"
    beside_a_gpu(monkeypatch)
    assert numbers_outside(torch.optim.Adam, cpu) == {"step": torch.tensor(0.0)}
    assert numbers_outside(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), cpu) == {}
