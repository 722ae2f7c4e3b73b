"""`pipefit cut`: the cut of a model that was not written for a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from pipefit.cli.answer import Answer
from pipefit.cli.models import ModelName, ModelOptions, make_model
from pipefit.cli.options import Json, Seed, ending, verb


@verb()
def command(
    model: ModelName,
    *,
    option: ModelOptions = None,
    output: Annotated[Path | None, Parameter(alias="-o"), ending(".svg")] = None,
    seed: Seed = 0,
    json: Json = False,
) -> Answer:
    """Show the layers of a model and the values that cross between them, and prove that the cut changes no result.

    Example: pipefit cut transformers:LlamaForCausalLM --option hidden_size=64,num_hidden_layers=4

    Args:
        model: transformers:CLASS with fields of its configuration as options, a folder that save_pretrained wrote, a
            built-in model, or your own as package.module:factory or file.py:factory.
        output: Picture of the layers and of the values that cross between them, as .svg.
        seed: Of the weights.
    """
    from pipefit.cutting import Cut, shared_weights, table
    from pipefit.stage.split import named_layers

    made = make_model(model, option, seed=seed).layers
    layers = named_layers(made)
    if isinstance(made, Cut):
        crossing = made.crossing
    else:
        crossing = ()
    rows = [
        {
            "layer": layer.name,
            "parameters": sum(parameter.numel() for parameter in layer.module.parameters()),
            **({"enters_bytes": size, "enters_tensors": count} if layer.index else {}),
        }
        for layer, (size, count) in zip(layers, [(0, 0), *crossing], strict=False)
    ]
    if isinstance(made, Cut):
        merged = dict(made.merged)
    else:
        merged = {}
    if output is not None:
        from pipefit.cutting.layers_picture import picture
        from pipefit.spec.files import write_atomically

        write_atomically(output, picture(made, model))
    if isinstance(made, Cut):
        way = made.way
    else:
        way = "of a sequence"
    data = {"model": model, "way": way, "layers": rows, "merged": merged, "shared": dict(shared_weights(layers))}
    return Answer(data, lambda: f"{model}: {table(made)}", output=[output] if output else [])
