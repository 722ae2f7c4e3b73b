"""Text generation by a pipeline: transformers prepares, samples and stops; each token is one pass of forwards."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from pipefit.cutting.caches import Past, caching, count, not_filled_once
from pipefit.cutting.own import is_transformers, without_adapters
from pipefit.cutting.shell import CutLayer, Shell
from pipefit.errors import DataError, ModelError
from pipefit.ir.program import Header
from pipefit.runtime.collectives import broadcast, exchange
from pipefit.runtime.engine import Engine
from pipefit.runtime.microbatches import MicroBatch
from pipefit.runtime.progress import TOKEN
from pipefit.runtime.worker import evaluating
from pipefit.schedules.forward import forward_only
from pipefit.stage.split import NamedLayer

_USUAL = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "return_dict_in_generate": False,
    "use_cache": True,
    "cache_implementation": None,
    "prefill_chunk_size": None,
    "max_time": None,  # ranks have different clocks
}
"""Options of transformers with fixed values, regardless of the model's own generation configuration."""
_NEEDED = "generate needs a causal language model of transformers, such as LlamaForCausalLM"
_PROMPTS = "expected prompts as a tensor of token ids, [sequences, tokens]"
_WHOLE = "save_pretrained, and generate with the whole model"


def generate(
    engine: Engine,
    header: Header,
    layers: Sequence[NamedLayer],
    ids: Any,
    mask: Tensor | None,
    seed: int,
    options: Mapping[str, Any],
) -> Tensor:
    """The prompts and their continuations, the same on every rank.

    Args:
        engine: the ranks.
        header: of the training's program: its stages.
        layers: of the whole model.
        ids: prompts of token ids, (sequences, tokens).
        mask: 0 where a prompt is padded, on its left; None: determined by transformers.
        seed: of the sampling.
        options: of `transformers.GenerationConfig`.

    Raises:
        DataError: the prompts are not such a tensor, or not the same on every rank.
        ModelError: the model generates no text, or cannot do so in stages.
    """
    model = _generator(layers)
    if not isinstance(ids, Tensor):
        raise DataError(f"{_PROMPTS}, got {type(ids).__name__}")
    if ids.dim() != 2 or not ids.numel() or ids.dtype not in (torch.int32, torch.int64):
        raise DataError(f"{_PROMPTS}, got {ids.dtype} {list(ids.shape)}")
    facts = [ids.tolist(), seed, sorted(options.items())]
    if mask is not None:
        mask = mask.cpu()
        facts.append(mask.tolist())
    checksum = hashlib.sha256(repr(facts).encode()).hexdigest()
    if len(set(exchange(engine.session, checksum))) > 1:
        raise DataError("ranks were given different prompts or options: every rank must make the same call of generate")
    random = torch.Generator().manual_seed(seed)

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **given: Any,
    ) -> Tensor:
        """Replaces `transformers.GenerationMixin._sample`."""
        padding = generation_config._pad_token_tensor
        going = torch.ones(len(input_ids), dtype=torch.bool)
        with _forwards(engine, header, given, model) as (past, forward):
            while going.any():
                is_first = not past.length
                next_length = None if is_first else 1
                inputs = model.prepare_inputs_for_generation(
                    input_ids, next_sequence_length=next_length, is_first_iteration=is_first, **given
                )
                logits = forward(inputs)
                given = model._update_model_kwargs_for_generation({}, given)
                count(past.cache, input_ids.shape[1])
                past.length = input_ids.shape[1]
                chosen = torch.empty(len(input_ids), dtype=torch.int64)
                if logits is not None:
                    scores = logits_processor(input_ids, logits[:, -1].to("cpu", torch.float32))
                    chosen = scores.argmax(-1)
                    if generation_config.do_sample:
                        chosen = torch.multinomial(scores.softmax(-1), 1, generator=random).squeeze(1)
                with engine.session.at(TOKEN):
                    broadcast(engine.session, chosen, header.placement[header.last_stage][0] * header.tensor)
                if padding is not None:
                    chosen = torch.where(going, chosen, padding)
                input_ids = torch.cat([input_ids, chosen[:, None]], 1)
                going &= ~stopping_criteria(input_ids, None)
        return input_ids

    options = {**_USUAL, **options}
    if getattr(model.config, "output_router_logits", False):
        options["output_router_logits"] = False
    with evaluating(engine.workers):
        return model.generate(ids.long().cpu(), attention_mask=mask, custom_generate=loop, **options)


def _generator(layers: Sequence[NamedLayer]) -> Any:
    """The model that generates, without the wrapper of peft."""
    shell = getattr(layers[0].module, "shell", None)
    if not isinstance(shell, Shell):
        raise ModelError(f"{_NEEDED}, not a sequence of layers")
    model = without_adapters(shell.model)
    if not is_transformers(shell.model) or not model.can_generate():
        raise ModelError(f"{_NEEDED}, not {type(shell.model).__name__}")
    if model.config.is_encoder_decoder:
        raise ModelError(
            f"{type(model).__name__} encodes its input before it decodes, which generate cannot do in stages: {_WHOLE}"
        )
    if getattr(getattr(shell.model, "active_peft_config", None), "is_prompt_learning", False):
        raise ModelError(f"adapters that lengthen the prompt cannot generate in stages: {_WHOLE}")
    return model


def _stages(engine: Engine) -> list[list[CutLayer]]:
    """The layers of each stage of this process."""
    stages = [stage for worker in engine.workers for stage in worker.stages.values()]
    return [[cast(CutLayer, layer.module) for layer in stage.layers] for stage in stages]


@contextlib.contextmanager
def _forwards(engine: Engine, header: Header, given: Mapping[str, Any], model: Any) -> Iterator[Any]:
    """A function that runs one forward over all stages, each of which keeps its keys and values.

    Args:
        engine: the ranks.
        header: of the training's program.
        given: arguments that transformers has prepared for the forwards of the model, with an empty cache.
        model: of transformers.

    Returns:
        The state of the caches, and the function from arguments to logits; None on ranks without them.
    """
    own_way = (
        f"{type(model).__name__} keeps earlier tokens in its own format, so it cannot generate in stages: {_WHOLE}"
    )
    past = Past.of(given)
    if past is None:
        raise ModelError(own_way)
    program = forward_only(header, 1)
    logits = []

    def take(output: Mapping[str, Tensor], target: Any) -> Tensor:
        logits.append(output["logits"])
        return torch.zeros(())

    with caching(_stages(engine), past) as caches:

        def forward(inputs: Mapping[str, Any]) -> Tensor | None:
            batch = {}
            options: dict[str, Any] = {"return_dict": True}
            for name, value in inputs.items():
                if isinstance(value, Tensor):
                    batch[name] = value
                elif name not in (past.name, "return_dict"):
                    options[name] = value
            past.options = options
            # Values that cross the borders have these shapes, for any length of the mask.
            signature = f"generate {list(batch['input_ids'].shape)}"
            logits.clear()
            engine.run(program, [MicroBatch(batch, {}, 1.0, 0, signature)], loss=take)
            if not past.length:
                own = []
                if engine.mesh.is_first:
                    own = [cache.filled() for cache in caches]
                filled = exchange(engine.session, own)
                if wrong := not_filled_once(past.cache, filled):
                    raise ModelError(f"{own_way} (layers {', '.join(map(str, wrong))})")
            if logits:
                return logits[0]
            return None

        yield past, forward
