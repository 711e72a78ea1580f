"""The driver against `verl_tinker`, which serves the Tinker API from verl's workers: what it takes and what it gives.

Its schema, read in verl-project/verl-recipe at commit 48ea0a79 and in the SDK that it pins, 0.19.0, is written down here as
data. No server was run: it needs GPUs.
"""

from dataclasses import asdict, is_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from fake_tinker import Client, Cloud, Sampling, Training, done, listed
from tinker_toys import rewarded, within

from rollalloc import recipes
from rollalloc.drivers.tinker import Remote, Service, TinkerTrainer
from rollalloc.models.settings import Sampling as Sampled
from rollalloc.train.config import Config
from tiny_policy import lines_of

# What a request may say; the server's types forbid anything else.
SAMPLING = {"max_tokens", "seed", "stop", "temperature", "top_k", "top_p"}
ADAM = {"learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"}  # the last is taken and not used
COLUMNS = {"target_tokens", "logprobs", "advantages"}  # read of a datum; a mask is made from what is not 0
LOSSES = {
    "cross_entropy": set(),
    "importance_sampling": set(),
    "ppo": {"clip_low_threshold", "clip_high_threshold"},
    "cispo": {"clip_low_threshold", "clip_high_threshold"},
    "dro": {"beta"},
}
# What an answer says.
SEQUENCE = {"stop_reason", "tokens", "logprobs"}
REASONS = {"stop": "stop", "length": "length"}
STEP_METRICS = ("grad_norm:mean", "lr:mean")  # verl's names with the reduction behind them
PASS_METRICS = ("loss:sum", "actor/pg_loss:sum", "actor/pg_clipfrac:mean")


def said(value: Any) -> dict[str, Any]:
    """The fields of a value of the SDK that go over the wire."""
    if hasattr(value, "model_dump"):
        return value.model_dump(exclude_none=True)
    return asdict(value) if is_dataclass(value) else vars(value)  # pyright: ignore[reportArgumentType]


class StrictSampling(Sampling):
    """Refuses what verl_tinker does, and answers with no more than it does; so do those below."""

    def sample(self, prompt: Any, num_samples: int, sampling_params: Any) -> Any:
        assert said(sampling_params).keys() <= SAMPLING
        assert num_samples > 0
        answer = super().sample(prompt, num_samples, sampling_params).result()
        sequences = [
            SimpleNamespace(stop_reason=REASONS[each.stop_reason], tokens=each.tokens, logprobs=each.logprobs)
            for each in answer.sequences
        ]
        assert all(vars(each).keys() == SEQUENCE for each in sequences)
        return done(SimpleNamespace(sequences=sequences, prompt_logprobs=None, topk_prompt_logprobs=None))


class StrictTraining(Training):
    """As above."""

    def save_weights_and_get_sampling_client(self) -> Any:
        return done(StrictSampling(self.cloud, self.weights.copy()))

    def forward_backward(self, data: list[Any], loss: str, config: Any) -> Any:
        assert data
        assert (config or {}).keys() <= LOSSES[loss]
        low, high = ((config or {}).get(f"clip_{end}_threshold", 1) for end in ("low", "high"))
        assert 0 <= low <= 1 <= high
        for datum in data:
            columns = {name: listed(column) for name, column in datum.loss_fn_inputs.items()}
            assert columns.keys() == COLUMNS
            tokens = datum.model_input.to_ints()
            assert {len(column) for column in columns.values()} == {len(tokens)}
            # The window of what was sampled is found by these: a token that was only read must have 0 in both.
            window = [
                at for at, pair in enumerate(zip(columns["advantages"], columns["logprobs"], strict=True)) if any(pair)
            ]
            assert window
            assert all(columns["advantages"][at] for at in window)
        answer = super().forward_backward(data, loss, config).result()
        total = answer.metrics["loss:sum"]
        metrics = dict.fromkeys(PASS_METRICS, 0.0) | {"loss:sum": total}
        return done(SimpleNamespace(metrics=metrics, loss_fn_outputs=answer.loss_fn_outputs))

    def optim_step(self, params: Any) -> Any:
        assert said(params).keys() - {"type"} <= ADAM
        [norm] = super().optim_step(params).result().metrics.values()
        return done(SimpleNamespace(metrics=dict.fromkeys(STEP_METRICS, norm)))


class StrictClient(Client):
    """One model at a time, whole: rank and seed are taken and not used."""

    def create_lora_training_client(self, base_model: str, rank: int = 32, seed: int | None = None) -> Any:
        made = super().create_lora_training_client(base_model, rank, seed).result()
        return done(StrictTraining(self.cloud, made.weights))

    def create_training_client_from_state_with_optimizer(self, path: str) -> Any:
        made = super().create_training_client_from_state_with_optimizer(path).result()
        return done(StrictTraining(self.cloud, made.weights))


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_what_is_sent_is_taken_and_what_is_read_is_there(sdk, loss, tmp_path):
    """A run, a checkpoint, and a run that goes on from it; no rollout is left without a score."""

    def trainer_of(batches):
        service = Service("some/model", Remote(loss=loss), 0, client=StrictClient(cloud))
        settings = Config(
            sampling=Sampled(max_new_tokens=3), learning_rate=4.0, checkpoint_every=2, max_batches=batches
        )
        return TinkerTrainer(service, within(recipes.grpo(4, 4), 96), rewarded(), settings, folder=tmp_path)

    cloud = Cloud()
    trainer_of(2).run()
    trainer = trainer_of(None)
    trainer.resume()
    trainer.run()
    lines = lines_of(tmp_path)
    batches = [line for line in lines if line["kind"] == "batch"]
    assert lines[-1]["accounts"]["failed"] == lines[-1]["accounts"]["open"] == 0
    assert {"grad_norm", "loss_sum", "tinker/lr:mean"} <= batches[0].keys()
