"""Simulated timelines, for the tests of pictures."""

from pipefit.cost import unit
from pipefit.schedules import Shape, generate
from pipefit.simulate import simulate
from pipefit.timeline import Timeline


def timeline_of(name: str, shape: Shape, **cost: float) -> Timeline:
    program = generate(name, shape)
    return simulate(program, unit(program.header, 1, 2, **cost), rendezvous=False)
