"""`pipefit cut`: the cut of a model that was not written for a pipeline."""

from __future__ import annotations

from pipefit.cli.answer import Answer
from pipefit.cli.models import ModelName, ModelOptions, make_model
from pipefit.cli.options import Json, Seed, verb
from pipefit.spec.files import JsonObject


@verb()
def command(
    model: ModelName,
    *,
    option: ModelOptions = None,
    seed: Seed = 0,
    json: Json = False,
) -> Answer:
    """Show the layers of a model and the values that cross between them, and prove that the cut changes no result.

    Example: pipefit cut transformers:LlamaForCausalLM --option hidden_size=64,num_hidden_layers=4

    Args:
        model: transformers:CLASS with fields of its configuration as options, a folder that save_pretrained wrote, a
            built-in model, or your own as package.module:factory or file.py:factory.
        seed: Of the weights.
    """
    import torch

    from pipefit.cutting import Cut, shared_weights, table
    from pipefit.stage.split import named_layers

    made = make_model(model, option, seed=seed).layers
    layers = named_layers(made)
    rows = []
    for layer in layers:
        rows.append({"layer": layer.name, "parameters": sum(map(torch.numel, layer.module.parameters()))})
    data: JsonObject = {
        "model": model,
        "way": "of a sequence",
        "merged": {},
        "shared": dict(shared_weights(layers)),
    }
    if isinstance(made, Cut):
        data |= {"way": made.way, "merged": dict(made.merged)}
        for row, (size, count) in zip(rows[1:], made.crossing, strict=False):
            row |= {"enters_bytes": size, "enters_tensors": count}
    data |= {"layers": rows}
    return Answer(data, lambda: f"{model}: {table(made)}")
