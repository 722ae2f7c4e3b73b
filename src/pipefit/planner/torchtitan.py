"""Costs of a Llama in torchtitan that differ from those in Megatron-LM, each with its source.

Legend: e bytes of an element, h hidden, t tensor width.
Sources: torchtitan of December 2024, `models/llama/model.py` (products, rotations, keys) and `parallelisms/
parallelize_llama.py` (replays, sums); torch, `utils/checkpoint.py` (`set_checkpoint_early_stop`), `distributed/fsdp/
_fully_shard/_fsdp_collectives.py` (copies of weights), `distributed/_functional_collectives.py` (copies of sums),
`_inductor/fx_passes/micro_pipeline_tp.py` and `distributed/_symmetric_memory` (sums that overlap).
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from pipefit.cost.rings import Ring, all_gather_s
from pipefit.cost.roofline import pass_s
from pipefit.planner.block_parts import Shape, seen_s, weights_s
from pipefit.planner.transformer import Transformer
from pipefit.spec import Device, Layer


class Times(NamedTuple):
    """Seconds of a block's products and of their sums over devices.

    Attributes:
        forward_s: of a forward.
        input_s: of the gradients of the inputs.
        weight_s: of the gradients of the weights.
        whole_s: of a replay of the block.
        part_s: of a replay of every second `mm`.
    """

    forward_s: float
    input_s: float
    weight_s: float
    whole_s: float
    part_s: float


def products(model: Transformer, tokens: int, t: int) -> list[list[Shape]]:
    """Queries, keys and values; attention's output; gate and its factor; the last one: each a product of its own."""
    h = model.hidden
    own = -(-h // t)
    keys = (tokens, -(-h * model.keys // (model.heads * t)), h)
    wide = -(-model.wide // t)
    return [[(tokens, own, h), keys, keys], [(tokens, h, own)], [(tokens, wide, h)] * 2, [(tokens, h, wide)]]


def product_times(device: Device, model: Transformer, tokens: int, ring: Ring) -> Times:
    """Seconds of the products and sums of a block, of which a device has its share.

    Inputs of the first and the third group are gathered, outputs of the others are scattered; back the other way round.
    What is gathered or scattered is copied, as the sequence is not the first dimension; 8 bits are gathered as such. An
    input that several products convert is converted once. A sum overlaps where it belongs to one product, which in a
    backward only gathers do; its parts are then added up.

    A replay ends with what the backward needs, so that the last product is not made again. Where every second `mm` is
    (`selective_ac_option = "op"`), scattered outputs are kept; a product of 8 bits is no `mm`, and made again.
    """
    t = ring.size
    e = model.bytes
    stream = tokens * model.hidden
    times = [[weights_s(device, model, shape) for shape in group] for group in products(model, tokens, t)]
    made = [sum(each.forward_s for each in group) for group in times]
    inputs = [sum(each.input_s for each in group) for group in times]
    width = e
    if model.fp8:
        width = 1
        converted_s = pass_s(device, (e + 2) * stream)
        made[0] -= 2 * converted_s
        made[2] -= converted_s
    gather_s = all_gather_s(ring, width * stream)
    scatter_s = all_gather_s(ring, e * stream)
    behind_s = scatter_s
    after_s = 0.0
    if t > 1:
        behind_s += pass_s(device, 2 * e * stream)
    if t > 1 and model.overlapped:
        after_s = pass_s(device, (1 + 1 / t) * e * stream)
    elif t > 1:
        gather_s += pass_s(device, 2 * width * stream)
        scatter_s = behind_s
    added_s = pass_s(device, 4 * e * stream) + pass_s(device, 3 * e * stream)
    sums_s = (gather_s, scatter_s, gather_s, scatter_s)
    again = made[:3]
    if not model.fp8:
        every = [each.forward_s for group in times for each in group]
        again = every[1::2]
    return Times(
        sum(made) + seen_s(model, sums_s, made, t) + 2 * after_s,
        sum(inputs) + added_s + 2 * behind_s + seen_s(model, sums_s[::2], inputs[1::2], t),
        sum(each.weight_s for group in times for each in group),
        sum(made[:3]) + seen_s(model, sums_s[:3], made[:3], t) + after_s,
        sum(again) + seen_s(model, (gather_s, 0.0, gather_s), again, t),
    )


def kept_bytes(model: Transformer, tokens: int, t: int, between: float) -> float:
    """Bytes that a block keeps where every second `mm` is made again: two of its stream, attention's output, products.

    Args:
        model: of the block.
        tokens: of a micro-batch.
        t: the devices that share the block.
        between: elements of the stream on each of them.
    """
    widths = model.hidden
    if not model.fp8:
        widths = model.qkv - model.hidden * model.keys // model.heads + model.hidden + model.wide
    return model.bytes * (2 * between + widths * tokens / t)


def with_copies(layer: Layer, device: Device, model: Transformer) -> Layer:
    """A layer with the copies that FSDP2 makes of its weights while nothing else is computed.

    Gathered weights are copied into tensors, in the forward and again in the backward; gradients are converted into one
    tensor before they are summed.
    """
    gathered_s = pass_s(device, 2 * layer.weight_bytes)
    converted_s = pass_s(device, (1 + (model.summed_bytes or model.bytes) / model.bytes) * layer.weight_bytes)
    return replace(
        layer,
        forward_s=layer.forward_s + gathered_s,
        backward_weight_s=layer.backward_weight_s + gathered_s + converted_s,
    )
