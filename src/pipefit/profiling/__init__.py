"""The cost of each layer of a model: measured on the device at hand, or computed for other devices."""

from pipefit.profiling.analytic import analytic_profile
from pipefit.profiling.links import fit_link, measure_links
from pipefit.profiling.machine import measure_device
from pipefit.profiling.measure import profile_layers, profile_sizes
from pipefit.profiling.model_count import count_model
from pipefit.profiling.tier_rates import measure_tier
