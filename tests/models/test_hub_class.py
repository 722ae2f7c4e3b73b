"""Models of transformers by their class, wherever models by name go."""

import pytest
from tests.verbs import answered

pytestmark = [pytest.mark.usefixtures("small_probes"), pytest.mark.slow]

pytest.importorskip("transformers")

FIELDS = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 64
}  # fmt: skip
MODEL = "transformers:LlamaForCausalLM"


@pytest.mark.long
def test_a_run_under_a_cap_and_a_trial_of_a_study_have_the_losses_of_a_run(capsys, tmp_path):
    options = ",".join(f"{name}={value}" for name, value in FIELDS.items())
    words = ("train", "--model", MODEL, "--option", options, "--ranks", "1", "--batch", "4", "--microbatches", "2",
             "--steps", "3", "--lr", "0.01", "--optimizer", "sgd", "--sample", "0")  # fmt: skip
    whole = answered(capsys, *words)
    capped = answered(capsys, *words, "--device-memory", "2 MiB")
    assert capped["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    study = tmp_path / "study.toml"
    fields = "\n".join(f"options.{name} = {value}" for name, value in FIELDS.items())
    study.write_text(
        f'format = "pipefit.study/1"\nname = "one"\noutput = "{tmp_path / "out"}"\nworkers = 1\nmodel = "{MODEL}"\n'
        f'batch = 4\nmicrobatches = 2\nsteps = 3\noptimizer = "sgd"\ndevice_memory = "2 MiB"\n{fields}\n'
        "[grid]\nlr = [0.01]\n"
    )
    (trial,) = answered(capsys, "study", str(study))["trials"]
    assert trial["status"] == "finished" and trial["shards"] > 1
    # A trial has a learning rate that stays, so only the first loss is that of the run.
    assert trial["losses"][0] == pytest.approx(whole["losses"][0], rel=1e-5)
