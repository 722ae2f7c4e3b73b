import json
import math
import random
from pathlib import Path

import pytest

import pipefit
from pipefit.errors import ProfileError
from pipefit.spec import Layer, Profile
from pipefit.spec.published import from_published, load_profile, published_names


def graph(*nodes, edges=(), **more):
    return {
        "model": "m",
        "nodes": [
            {"id": n, "desc": d, "forward_ms": 2, "backward_ms": 4, "activation_bytes": 8, "parameter_bytes": w}
            for n, d, w in nodes
        ],
        "edges": [list(edge) for edge in edges],
        **more,
    }


ABC = (("a", "Conv", 1), ("b", "ReLU", 0), ("c", "Linear", 2))


@pytest.mark.parametrize(
    ("name", "num_layers", "batch", "seconds", "weights"),
    [
        ("vgg16", 41, 128, 0.672535, 553430176),
        ("resnet50", 177, 128, 0.443419, 102228128),
        ("gnmt", 40, 32, 0.089416, 775063808),
        ("alexnet", 23, 256, 0.085321, 244403360),
        ("inception_v3", 326, 128, 0.689038, 108645056),
        ("gnmt_large", 80, 128, 0.520453, 1110870272),
    ],
)
def test_published_profiles_come_with_the_package(name, num_layers, batch, seconds, weights):
    profile = load_profile(name)
    assert (len(profile), profile.microbatch_size) == (num_layers, batch)
    assert sum(layer.total_s for layer in profile.layers) == pytest.approx(seconds)
    assert sum(layer.weight_bytes for layer in profile.layers) == weights
    assert "pipedream" in profile.source and name in published_names()


@pytest.mark.parametrize("name", ["gnmt", "gnmt_large"])
def test_the_batch_of_an_lstm_is_that_of_its_final_state(name):
    path = Path(pipefit.__file__).parent / "profiles_published" / f"{name}.json"
    nodes = json.loads(path.read_text())["nodes"]
    batch = load_profile(name).microbatch_size
    lstms = [node for node in nodes if node["desc"] == "LSTM(1024, 1024)"]
    words = {(node["activation_bytes"] - 2 * 4 * 1024 * batch) / (4 * 1024 * batch) for node in lstms}
    assert len(words) == 1 and words.pop().is_integer()


def test_data_loading_costs_nothing():
    first = load_profile("vgg16").layers[0]
    assert "Input" in first.name and first.total_s == first.output_bytes == 0


def test_backward_is_halved_only_where_there_are_weights():
    conv, relu, _ = from_published(graph(*ABC, edges=[("a", "b"), ("b", "c")])).layers
    assert (conv.forward_s, conv.backward_input_s, conv.backward_weight_s) == (0.002, 0.002, 0.002)
    assert (relu.backward_input_s, relu.backward_weight_s) == (0.004, 0.0)


def test_unused_parts_of_outputs_are_left_out_and_used_ones_stay():
    nodes = (*ABC, ("d", "__getitem__(1)", 0), ("e", "__getitem__(0)", 0))
    profile = from_published(graph(*nodes, edges=[("a", "d"), ("a", "e"), ("e", "b"), ("b", "c")]))
    assert [layer.name[0] for layer in profile.layers] == ["a", "e", "b", "c"]
    assert profile.edges == ((0, 1), (1, 2), (2, 3))


def test_any_order_of_nodes_becomes_an_order_in_which_data_flows_forward():
    data = json.loads((Path(pipefit.__file__).parent / "profiles_published" / "resnet50.json").read_text())
    random.Random(1).shuffle(data["nodes"])
    profile = from_published(data)
    assert len(profile) == 177 and all(tail < head for tail, head in profile.links)


def test_own_format_loads_too(tmp_path):
    profile = Profile("p", 2, (Layer("x", 1, 1, 1, 1, 1, 1), Layer("y", 1, 1, 1, 1, 1, 1)), ((0, 1),))
    profile.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile


def refused(data, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_cycle_is_refused_with_its_nodes(tmp_path):
    message = refused(graph(*ABC, edges=[("a", "b"), ("b", "c"), ("c", "b")]), tmp_path)
    assert "cycle" in message and ("b → c → b" in message or "c → b → c" in message)


@pytest.mark.parametrize("value", [-1, math.nan, math.inf])
def test_negative_and_endless_figures_are_refused_with_their_path(value, tmp_path):
    data = graph(*ABC)
    data["nodes"][1]["forward_ms"] = value
    assert "nodes[1].forward_ms" in refused(data, tmp_path)


def test_a_missing_figure_is_refused_with_its_path(tmp_path):
    data = graph(*ABC)
    del data["nodes"][2]["activation_bytes"]
    message = refused(data, tmp_path)
    assert "activation_bytes" in message and "nodes[" in message


def test_edges_to_nowhere_and_double_ids_are_refused(tmp_path):
    assert "edges[0][1]: there is no node 'z'" in refused(graph(*ABC, edges=[("a", "z")]), tmp_path)
    assert "nodes[1].id" in refused(graph(("a", "x", 1), ("a", "y", 1)), tmp_path)
    assert "at least one layer" in refused(graph(), tmp_path)


def test_unknown_formats_files_and_names_are_refused(tmp_path):
    assert "pipefit.profile/1" in refused({"format": "pipefit.profile/9"}, tmp_path)
    with pytest.raises(ProfileError, match="did you mean vgg16"):
        load_profile("vgg")
    with pytest.raises(ProfileError, match="no such file"):
        load_profile(tmp_path / "none.json")
