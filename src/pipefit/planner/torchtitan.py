"""What torchtitan does otherwise than Megatron-LM with a Llama; each with its source.

Legend: e bytes of an element, h hidden, t tensor width.
Sources: torchtitan of December 2024, `models/llama/model.py` (rotations, keys) and `parallelisms/parallelize_llama.py`
(replays, sums); torch, `utils/checkpoint.py` (`set_checkpoint_early_stop`) and `distributed/fsdp/_fully_shard/
_fsdp_collectives.py` (copies).
"""

from __future__ import annotations

from msgspec.structs import replace

from pipefit.cost.roofline import pass_s
from pipefit.planner.block_parts import Shape
from pipefit.planner.transformer import Transformer
from pipefit.spec import Device, Layer


def rotations(model: Transformer, stream: float) -> list[float]:
    """Bytes of the kernels that rotate queries and keys, and repeat keys and values for every head; the same back.

    Rotations multiply complex numbers of 4-byte parts, for which `torch.compile` makes no kernels (torchtitan, issue
    15): to 4 bytes, times, and back.

    Args:
        model: that rotates.
        stream: elements of the queries.
    """
    e = model.bytes
    both = (1 + model.keys / model.heads) * stream
    kernels = [(e + 4) * both, 8 * both, (4 + e) * both]
    if model.keys < model.heads:
        kernels += [e * both] * 2
    return kernels


def every_second(model: Transformer, tokens: int, t: int) -> list[Shape]:
    """The products that a replay makes again where every second `mm` is: keys, attention's output, the gate's factor.

    The others are kept (`selective_ac_option = "op"`). Products of 8 bits are no `mm`, so that all but the last one are
    made again: a replay ends with what the backward needs.
    """
    h = model.hidden
    keys = h * model.keys // model.heads
    return [(tokens, -(-keys // t), h), (tokens, h, -(-h // t)), (tokens, -(-model.wide // t), h)]


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
