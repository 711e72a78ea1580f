"""The driver over the real SDK and a real server, where there is one.

    TINKER_BASE_URL=http://127.0.0.1:8901 TINKER_API_KEY=tml-none ROLLALLOC_TINKER_MODEL=path/to/model \\
        pytest tests/drivers/tinker/test_server.py

docs/tinker.md says how to have one on a CPU.
"""

from __future__ import annotations

import os
import signal

import pytest
from tinker_toys import prompts_of, within

from rollalloc import recipes
from rollalloc.drivers.tinker import Prices, Remote, Rewarded, Service, TinkerTrainer
from rollalloc.models.settings import Sampling
from rollalloc.processes.stopping import Stopped
from rollalloc.rewards.scorers import InlineScorer
from rollalloc.train.config import Config
from tiny_policy import lines_of

MODEL = os.environ.get("ROLLALLOC_TINKER_MODEL")


@pytest.mark.slow
@pytest.mark.skipif(
    MODEL is None, reason="needs a server of the Tinker API, and ROLLALLOC_TINKER_MODEL, its base model"
)
def test_a_run_is_stopped_and_goes_on(tmp_path):
    """All but that it learns: of so tiny a model without training that was not shown (lab/log)."""

    def trainer_of(listener=None):
        service = Service(MODEL, Remote(rank=8), 0)
        episodes = Rewarded(
            prompts_of(8), InlineScorer(lambda *, solution_str, **_: float(int(solution_str.split()[0]) % 2 == 0)), ids
        )
        settings = Config(sampling=Sampling(max_new_tokens=4), learning_rate=5e-3, checkpoint_every=4)
        recipe = within(recipes.dapo(groups=4, n=4, gen_groups=4), 9 * 16)
        prices = Prices(prefill=1, sampled=1, trained=1)
        return TinkerTrainer(service, recipe, episodes, settings, folder=tmp_path, listener=listener, prices=prices)

    def ids(tokens):
        return " ".join(map(str, tokens))

    def listener(line):
        if line["kind"] == "batch" and line["batch"] == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Stopped):
        trainer_of(listener).run()
    trainer = trainer_of()
    assert trainer.resume() == 3
    trainer.run()
    lines = lines_of(tmp_path)
    assert max(line["sampler_kl"] for line in lines if "sampler_kl" in line) < 1e-3
    assert lines[-1]["accounts"]["failed"] == lines[-1]["accounts"]["open"] == 0
