"""The figures that records name, in addition to the metrics of drawings, and the pictures of their own kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipefit.reproduce import amoebanet, drawings, hydra, measured, predicted, questions
from pipefit.reproduce.drawings import metric
from pipefit.reproduce.topology_picture import topology_picture

__all__ = ["FIGURES", "PICTURES", "metric"]

_FUNCTIONS = (
    amoebanet.amoebanet_activations_gb,
    amoebanet.amoebanet_parameters,
    amoebanet.amoebanet_states_gb,
    drawings.follows_2bw,
    drawings.fetches,
    drawings.has_fast_servers,
    drawings.instructions,
    drawings.one_worker_each,
    drawings.replays_per_forward,
    drawings.rule_broken_by_newest_weights,
    drawings.s_per_microbatch,
    drawings.same_everywhere,
    drawings.same_version,
    drawings.saved_samples,
    drawings.versions_by_rank,
    hydra.measured_makespan,
    hydra.study_energy,
    hydra.study_time,
    measured.course,
    measured.measured_rate,
    measured.time_to,
    predicted.activations_gb,
    predicted.checkpointed_gb,
    predicted.days,
    predicted.days_by_formula,
    predicted.days_of_slide,
    predicted.fits,
    predicted.fullest_weights_gb,
    predicted.layers,
    predicted.least_checkpoints,
    predicted.memory_gb,
    predicted.message_mb,
    predicted.microbatch,
    predicted.one_by_one,
    predicted.parameters,
    predicted.pipeline_mb,
    predicted.rate,
    predicted.replicas,
    predicted.share,
    predicted.speedup,
    predicted.speedup_by_hand,
    predicted.stage_gb,
    predicted.stages,
    predicted.states_gb,
    predicted.stalls,
    predicted.sums_mb,
    predicted.tflops,
    predicted.weights_gb,
    predicted.weights_per_second,
    predicted.years,
    questions.layers_on_mixed,
    questions.resumes_alike,
)

FIGURES: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in _FUNCTIONS}
"""Every figure by its name: a function of the bench, of the step where it needs one, and of what is given."""

PICTURES: Mapping[str, Callable[..., Any]] = {"sharp": hydra.sharp_picture, "topology": topology_picture}
"""Every picture of its own kind by its name."""
