"""Small profiles and topologies, by hand and at random."""

from hypothesis import strategies as st

from pipefit.spec import Layer, Level, Profile, Topology


def chain(times, outputs=None, weights=None, saved=None, model="chain") -> Profile:
    n = len(times)
    columns = [times, outputs or [0] * n, weights or [0] * n, saved or [0] * n]
    layers = (
        Layer(f"layer{i}", t / 2, t / 4, t / 4, out, save, weight)
        for i, (t, out, weight, save) in enumerate(zip(*columns, strict=True))
    )
    return Profile(model, 1, tuple(layers))


def topology(*levels: tuple[int, float]) -> Topology:
    return Topology(tuple(Level(f"level{i}", width, bandwidth) for i, (width, bandwidth) in enumerate(levels)))


@st.composite
def profiles(draw, max_layers=5, graph=True) -> Profile:
    """Few layers whose times, outputs and weights are of one size, so that each of them decides somewhere."""
    count = draw(st.one_of(st.integers(1, max_layers), st.just(max_layers)))
    times, sizes = st.integers(0, 9), st.sampled_from([0, 1, 3, 8, 8, 20, 60])
    layers = []
    for index in range(count):
        forward, inputs, weight_s = draw(st.tuples(times, times, times))
        output, saved, weights = draw(st.tuples(sizes, times, sizes))
        layers.append(Layer(f"layer{index}", forward, inputs, weight_s, output, saved, weights))
    edges = None
    if graph and draw(st.booleans()):
        pairs = [(i, j) for j in range(count) for i in range(j)]
        edges = tuple(pair for pair in pairs if draw(st.booleans()))
    return Profile("random", 1, tuple(layers), edges, loss_s=draw(st.sampled_from([0, 0, 5])))


bandwidths = st.sampled_from([0.5, 2.0, 7.0, 20.0])
conventions = st.sampled_from(["paper", "ring", "pipedream-code"])
