"""Built-in models as named layers, and those of users."""

from pipefit.models import gpt_tensor  # gives the GPT's layers their tensor rules
from pipefit.models.convolution import convnet
from pipefit.models.gpt import gpt
from pipefit.models.mlp import mlp
from pipefit.models.registry import BUILT_IN, ModelBundle, build, parse_options
