"""Links and devices, measured."""

import os
import threading
import time
from queue import Queue

import pytest
import torch

from pipefit.cost import speeds_of
from pipefit.errors import TopologyError
from pipefit.profiling import (
    fit_link,
    links,
    measure_device,
    measure_links,
)
from pipefit.profiling.links import ping_pong, topology_of
from pipefit.runtime.launch import launch
from pipefit.runtime.session import current
from pipefit.spec.topology import Device, Topology

pytestmark = pytest.mark.slow


def test_a_link_is_fitted_exactly_and_never_with_a_negative_latency():
    sizes = [1e3, 1e5, 1e7]
    latency_s, bandwidth = fit_link(sizes, [5e-5 + n / 3e9 for n in sizes])
    assert latency_s == pytest.approx(5e-5)
    assert bandwidth == pytest.approx(3e9)
    latency_s, bandwidth = fit_link([1e3, 1e6], [1e-7, 1.1e-3])
    assert latency_s == 0
    assert bandwidth > 0


@pytest.mark.parametrize(("sizes", "seconds"), [([1e3], [1.0]), ([1e3, 1e6], [2.0, 1.0]), ([1e3, 1e6], [0.0, 1.0])])
def test_times_that_say_nothing_about_a_link_are_refused(sizes, seconds):
    with pytest.raises(TopologyError):
        fit_link(sizes, seconds)


def test_samples_inside_and_between_hosts_make_two_levels():
    sizes = (1000, 1_000_000)
    inside, between = (
        [latency_s + n / bandwidth for n in sizes] for latency_s, bandwidth in ((1e-5, 1e10), (1e-3, 1e8))
    )
    times = {(0, 1): inside, (2, 3): inside, (0, 2): between}
    topology = topology_of(times, sizes, world=4, per_host=2, each=Device(), name="two hosts", cores=1)
    assert topology.machine == (2, 1)
    assert [(level.name, level.width) for level in topology.levels] == [("host", 2), ("network", 2)]
    assert [level.latency_s for level in topology.levels] == pytest.approx([1e-5, 1e-3])
    assert [level.bandwidth_bytes_per_s for level in topology.levels] == pytest.approx([1e10, 1e8])


def test_ping_and_pong_alternate():
    there, back, log = Queue(), Queue(), []

    def side(name, out, into, starts):
        def send(size):
            log.append((name, size))
            out.put(size)

        return ping_pong(send, lambda size: into.get(timeout=10), starts, (1, 2), repeats=3)

    other = threading.Thread(target=side, args=("b", back, there, False))
    other.start()
    seconds = side("a", there, back, True)
    other.join(10)
    assert log == [("a", 1), ("b", 1), ("a", 2), ("b", 2)] * 5
    assert all(time > 0 for time in seconds)


def links_by_rule() -> Topology:
    """The messages are real, the times are not: on a busy machine they may say anything."""
    real = links.ping_pong

    def timed_by_rule(send, receive, starts, sizes, repeats):
        assert len(real(send, receive, starts, sizes, repeats)) == len(sizes)
        return [1e-5 + size / 1e9 for size in sizes]

    links.ping_pong = timed_by_rule
    current()
    return measure_links(sizes=(1024, 1 << 20), repeats=4)


@pytest.mark.dist
def test_every_rank_learns_the_same_links():
    first, second = launch(links_by_rule, 2, threads=1, quiet=True)
    assert first == second
    (level,) = first.levels
    assert level.width == 2
    assert level.cores == len(os.sched_getaffinity(0))
    assert level.latency_s == pytest.approx(1e-5)
    assert level.bandwidth_bytes_per_s == pytest.approx(1e9)


def links_with_a_slow_rank() -> Topology:
    """A product takes rank 1 much longer."""
    if current().rank == 1:
        fast = torch.mm

        def slow(*matrices):
            time.sleep(0.2)
            return fast(*matrices)

        torch.mm = slow
    return links_by_rule()


@pytest.mark.dist
def test_links_know_the_rank_that_is_slow():
    first, second = launch(links_with_a_slow_rank, 2, threads=1, quiet=True)
    assert first == second
    fast, slow = first.devices
    assert first.device == fast and slow.flops < fast.flops / 2
    assert speeds_of(first) == pytest.approx((1.0, slow.flops / fast.flops))


def test_a_device_is_measured_in_its_own_units():
    device = measure_device(ranks=2, repeats=1)
    assert device.flops > 1e8
    assert device.memory_bandwidth_bytes_per_s > 1e7
    assert 0 < device.memory_bytes < 1e13
