"""torchtitan's Llama: what its replays make again, by torch itself; its rotations, copies and sums, by their bytes."""

from collections import Counter

import msgspec
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pipefit.cost.roofline import product_s
from pipefit.planner.block_parts import complex_rotations
from pipefit.planner.computed_profile import transformer_profile
from pipefit.planner.machines import load_topology
from pipefit.planner.measured_runs import MeasuredRun, predict
from pipefit.planner.torchtitan import products, with_copies
from pipefit.planner.transformer import transformer_of

H, HEADS, KV, FFN, TOKENS = 64, 8, 2, 160, 32
WIDTHS = {"q": H, "k": H * KV // HEADS, "v": H * KV // HEADS, "o": H, "gate": FFN, "up": FFN, "down": H}


class Products(TorchDispatchMode):
    """Counts products by the size of their output."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mm.default:
            self.found[tuple(made.shape), args[0].shape[1]] += 1
        return made


class Block(nn.Module):
    """The products of torchtitan's block in their order; the core of attention is not one that is counted."""

    def __init__(self):
        super().__init__()
        for name, width in WIDTHS.items():
            setattr(self, name, nn.Linear(FFN if name == "down" else H, width, bias=False))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        # Not torch's attention: any function that has the shapes and needs all three.
        x = x + self.o(q.tanh() * (k * v).repeat(1, HEADS // KV).tanh())
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def policy():
    """Every second `mm` is made again, as in torchtitan with `selective_ac_option = "op"`."""
    count = Counter()

    def choose(context, function, *args, **kwargs):
        if function is not torch.ops.aten.mm.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        count[context.is_recompute] += 1
        if count[context.is_recompute] % 2:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def products_of_backward(**options):
    torch.manual_seed(0)
    block = Block()
    x = torch.randn(TOKENS, H, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=False, **options) if options else block(x)
    with Products() as products:
        out.sum().backward()
    return products.found


def test_replays_of_torch_make_the_same_products_again():
    plain = products_of_backward()
    again = products_of_backward(context_fn=policy) - plain
    model = transformer_of(f"llama:layers=1,hidden={H},heads={HEADS},kv_heads={KV},ffn={FFN},torchtitan=1")
    every = [((m, n), k) for group in products(model, TOKENS, 1) for m, n, k in group]
    assert again == Counter(every[1::2])
    # A replay of the whole block leaves out the last product, which nothing needs.
    again = products_of_backward(preserve_rng_state=False) - plain
    assert (
        again
        == Counter(((TOKENS, width), H) for name, width in WIDTHS.items() if name != "down")
        == Counter(every[:-1])
    )


LLAMA = "llama:layers=2,hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,sequence=8192,fused_passes=1"
GB_S = 2208e9
KERNEL_S = 4e-6
MACHINE = load_topology("grand-teton-h100-512")
# All devices alike: none is slower than the others.
MACHINE = msgspec.structs.replace(MACHINE, device=msgspec.structs.replace(MACHINE.device, spread=0.0))


def block_of(settings="", tensor=1):
    model = transformer_of(LLAMA + settings)
    return transformer_profile(model, 1, MACHINE.device, topology=MACHINE, tensor=tensor).layers[1]


def test_rotations_of_complex_numbers_move_ten_elements_and_keys_are_written_for_every_head():
    queries, keys = 8192 * 4096, 8192 * 1024
    moved = sum(complex_rotations(transformer_of(LLAMA), queries))
    # To 4 bytes, multiplied, and back; keys and values are read once and written for all heads.
    assert moved == (2 + 4 + 4 + 4 + 4 + 2) * (queries + keys) + 2 * 2 * (queries + keys)


def test_copies_of_fsdp_move_weights_twice_and_gradients_once():
    plain = transformer_profile(transformer_of(LLAMA), 1, MACHINE.device, topology=MACHINE).layers[1]
    copied = with_copies(plain, MACHINE.device, transformer_of(f"{LLAMA},summed_bytes=4"))
    weights = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 2 * 4096
    assert copied.forward_s - plain.forward_s == pytest.approx(4 * weights / GB_S + KERNEL_S, rel=1e-6)
    # Gathered again, and gradients of 2 bytes converted to 4.
    assert copied.backward_s - plain.backward_s == pytest.approx((4 + 6) * weights / GB_S + 2 * KERNEL_S, rel=1e-6)


def test_a_whole_replay_leaves_out_the_last_product_and_a_selective_one_most():
    block = block_of(",torchtitan=1")
    whole, part = block.replaying("layer"), block.replaying("selective")
    last_s = product_s(MACHINE.device, 8192, 4096, 14336)
    again_s = whole.backward_s - block.backward_s
    # The copies of gathered weights, and the second sum of residual and branch, are not made again either.
    others_s = (4 * (block.weight_bytes / 2) + 6 * 8192 * 4096) / GB_S + 2 * KERNEL_S
    assert block.forward_s - again_s == pytest.approx(last_s + others_s, rel=1e-6)
    assert 0.2 < (part.backward_s - block.backward_s) / again_s < 0.6
    assert whole.saved_bytes == 2 * 8192 * 4096 < part.saved_bytes < block.saved_bytes
    # In 8 bits all products are made again, but the core of attention is not.
    block = block_of(",torchtitan=1,fp8=1")
    whole, part = block.replaying("layer"), block.replaying("selective")
    # Half of the scores, and the last rows of each core (128 rows of a head of 128).
    flop = 2 * 8192 * 8192 * 4096 + 132 * 4 * 128 * 8192 * 128
    core_s = flop / (989e12 * 0.72 * 0.44) + KERNEL_S
    assert whole.backward_s - part.backward_s == pytest.approx(core_s, rel=1e-6)


def test_a_backward_hides_gathers_only_and_8_bits_halve_them():
    sharing = ",torchtitan=1,sequence_parallel=1"
    half_s = 7 / 8 * 2 * 8192 * 4096 / 348e9 + 7 * 3.4e-6
    plain, hidden = block_of(sharing, tensor=8), block_of(f"{sharing},overlapped=1", tensor=8)
    # Next to gradients of attention's output and of the feed-forward's, piece by piece but the first.
    beside_s = [product_s(MACHINE.device, 8192, width, 4096) for width in (4096 // 8, 14336 // 8)]
    less_s = 7 / 8 * sum(min(half_s, each_s) for each_s in beside_s)
    # What is gathered comes in its place, and need not be copied there.
    copy_s = 2 * 2 * 8192 * 4096 / GB_S + KERNEL_S
    assert plain.backward_s - hidden.backward_s == pytest.approx(less_s + 2 * copy_s, rel=1e-6)
    assert hidden.forward_s < plain.forward_s
    # Gathers of 8 bits take half of the time: two each way.
    fast = block_of(f"{sharing},fp8=1", tensor=8)
    slow = msgspec.structs.replace(MACHINE, levels=tuple(map(slower, MACHINE.levels)))
    model = transformer_of(f"{LLAMA}{sharing},fp8=1")
    other = transformer_profile(model, 1, MACHINE.device, topology=slow, tensor=8).layers[1]
    more_s = (2 * 0.5 + 2) * 7 / 8 * 2 * 8192 * 4096 / 348e9
    assert other.forward_s - fast.forward_s == pytest.approx(more_s, rel=1e-6)


def slower(level):
    return msgspec.structs.replace(level, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s / 2)


def seconds_of(chunks=2, shard="weights", machine=MACHINE, settings=""):
    model = f"{LLAMA}{settings},torchtitan=1,summed_bytes=4"
    return predict(MeasuredRun(model, 8, 1, 1, chunks, 2, 16, "none", shard, None), machine).seconds


@pytest.mark.slow
def test_gathers_and_sums_of_stages_are_hidden_by_work_but_the_first_and_the_last():
    computed_s = seconds_of(machine=msgspec.structs.replace(MACHINE, levels=tuple(map(free, MACHINE.levels))))
    weights = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336) + 2 * 4096
    first = weights + 128256 * 4096
    # What is first gathered in 2 bytes, and last summed in 4, has nothing next to it.
    waits_s = 7 / 8 * (2 + 4) * first / 348e9
    assert seconds_of() - computed_s == pytest.approx(waits_s, rel=0.15)
    assert seconds_of() == seconds_of(settings=",overlapped=1")  # which is said of the program already


def free(level):
    return msgspec.structs.replace(level, bandwidth_bytes_per_s=1e18, latency_s=0.0)
