"""On a device that is not the CPU: nothing is where it should not be, the same tokens come, and the host seldom waits.

The device is `gpu_stand_in`, a stand-in for a GPU; what a kernel of a GPU rounds otherwise it does not show.
"""

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from arithmetic import tokens_by_key
from gpu_stand_in import register, stand_in
from rollalloc import recipes
from rollalloc.core.events import Batch, Row
from rollalloc.generate.sampler import Generation, Request, generate
from rollalloc.generate.stream import backend
from rollalloc.generate.stream.local import LocalBackend
from rollalloc.models.featurizer import features_of
from rollalloc.models.likelihood import exact_answers
from rollalloc.models.policy import Policy
from rollalloc.models.settings import Lora, Loss, Sampling, Streaming
from rollalloc.train.config import Config
from rollalloc.train.evaluation import HeldOut
from rollalloc.train.update import Updater
from tiny_policy import lines_of

try:
    register()
except RuntimeError as error:
    pytest.skip(str(error), allow_module_level=True)
LENGTH = 12


@pytest.fixture
def device():
    """The device; what is compared with it attends in the same way."""
    with sdpa_kernel(SDPBackend.MATH), stand_in() as counts:
        yield counts


@pytest.fixture
def on(policy_of):
    """(place) → a policy that is there."""

    def made(place):
        policy = policy_of()
        policy.model.to(place)
        return policy

    return made


# ---------------------------------------------------------------------------------------------------- the device itself

REFUSED = {
    "two places": (lambda x: x + torch.ones(3), "found at least two devices"),
    "an index that CUDA does not move": (lambda x: x.index_select(0, torch.tensor([1])), "found at least two devices"),
    "a mask from the CPU into a CPU's": (lambda x: torch.ones(3)[x > 0], "found at least two devices"),
    "numpy": (lambda x: x.numpy(), "can't convert cuda:0"),
    "another generator": (lambda x: x.normal_(generator=torch.Generator()), "Expected a 'cuda' device type"),
    "another GPU": (lambda x: torch.ones(3, device="cuda:1"), "invalid device ordinal"),
    "read before it is there": (lambda x: x.to("cpu", non_blocking=True), "not waited for"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_the_device_refuses_what_cuda_would(device, what):
    act, why = REFUSED[what]
    with pytest.raises((RuntimeError, TypeError), match=why):
        act(torch.tensor([1.0, 2.0, 3.0], device="cuda"))


WAITS = {
    "item": (lambda x: x[0].item(), 1),
    "bool": (lambda x: bool(x.any()), 1),
    "float": (lambda x: float(x.sum()), 1),
    "tolist": (lambda x: x.tolist(), 1),
    "cpu": (lambda x: x.cpu(), 1),
    "nonzero": (lambda x: x.nonzero(), 1),
    "a mask": (lambda x: x[x > 1], 1),
    "there": (lambda x: x.to(torch.float64), 0),
    "sent": (lambda x: torch.ones(3).to("cuda"), 1),
    "sent, and not waited for": (lambda x: torch.ones(3).to("cuda", non_blocking=True), 0),
    "an index from the CPU": (lambda x: x[torch.tensor([1])], 1),
    "a number from the CPU": (lambda x: x * torch.tensor(2.0), 0),
    "computed": (lambda x: (x * 2).cumsum(0).topk(2).values.masked_fill(x[:2] > 1, 0).to(x.device), 0),
}


@pytest.mark.parametrize("what", WAITS)
def test_the_device_counts_where_the_host_waits(device, what):
    act, waits = WAITS[what]
    x = torch.tensor([1.0, 2.0, 3.0], device="cuda")
    device.reset()
    act(x)
    assert device.synchronisations == waits


# ---------------------------------------------------------------------------------------------------- parts of a trainer


@pytest.fixture
def requests(prompts_of):
    """Prompts of three lengths, four rollouts each."""
    tokens = [each[: 2 + at % 3] for at, each in enumerate(prompts_of(9).tokens)]
    return [Request(at, each, tuple(range(4 * at, 4 * at + 4))) for at, each in enumerate(tokens)]


@pytest.fixture
def by_key():
    """Tokens that hang on no rounding."""
    with tokens_by_key():
        yield


def sampled(policy, requests):
    made = generate(policy.model, requests, Sampling(LENGTH), eos_ids=policy.eos_ids, pad_id=policy.pad_id, seed=3)
    return [(each.tokens, each.truncated) for each in made], np.concatenate([each.logprobs for each in made])


def streamed(policy, requests):
    given = {"eos_ids": policy.eos_ids, "pad_id": policy.pad_id, "seed": 3, "longest_prompt": 5}
    running = LocalBackend(policy.model, backend.Decoding(sampling=Sampling(LENGTH, max_rows=7), **given))
    running.submit(
        [backend.RunningRow(rollout, each.prompt, each.tokens) for each in requests for rollout in each.rollouts]
    )
    ended = {}
    while len(ended) < 4 * len(requests):
        ended |= {each.rollout: each for each in running.poll(10.0)}
    steps = len(running.paces())
    running.close()
    tokens = [ended[rollout].tokens for rollout in sorted(ended)]
    return tokens, np.concatenate([ended[rollout].logprobs for rollout in sorted(ended)]), steps


@pytest.mark.usefixtures("by_key")
def test_the_sampler_waits_once_a_decoding_step(device, on, requests):
    tokens, logprobs = sampled(on("cpu"), requests)
    there = on("cuda")
    device.reset()
    assert sampled(there, requests)[0] == tokens
    steps = max(len(each) for each, _ in tokens)
    assert device.synchronisations == device.to_host == steps == LENGTH
    # Ids and mask of the prompts, one index of rows, draws for all steps; and an index each time that rows are dropped.
    assert device.to_device <= 4 + steps
    np.testing.assert_allclose(sampled(there, requests)[1], logprobs, atol=1e-4)


@pytest.mark.usefixtures("by_key")
def test_rollouts_that_stream_make_the_host_wait_once_a_step(device, on, requests):
    tokens, logprobs, _ = streamed(on("cpu"), requests)
    there = on("cuda")
    device.reset()
    found, found_logprobs, steps = streamed(there, requests)
    assert found == tokens
    np.testing.assert_allclose(found_logprobs, logprobs, atol=1e-4)
    assert device.synchronisations == device.to_host == steps


@pytest.mark.parametrize("changes", [{"loss": Loss(kl=0.1)}, {"precision": "bf16"}], ids=lambda each: min(each))
def test_an_optimizer_step_makes_the_host_wait_once(device, on, prompts_of, changes):
    """For the figures of the step and the norm of the weights after it, together."""
    settings = Config(**{"sampling": Sampling(4), "precision": "fp32", "optimizer_steps_per_batch": 2} | changes)
    tokens = prompts_of(4).tokens
    generations = {
        rollout: Generation(
            rollout, (3, 4, 5, 1)[-1 - rollout % 4 :], np.full(1 + rollout % 4, -1.0, np.float32), False
        )
        for rollout in range(16)
    }
    rows = tuple(
        Row(
            rollout, rollout // 4, rollout // 4, advantage=1.0 if rollout % 2 else -1.0, weight=1.0, version=rollout % 2
        )
        for rollout in range(16)
    )
    found = []
    for place in ("cpu", "cuda"):
        updater = Updater(on(place), tokens, settings)
        updater.update(Batch(rows, 1), generations)  # moments are made in the first
        device.reset()
        found.append(updater.update(Batch(rows, 1), generations))
    assert device.synchronisations == device.to_host == found[1]["steps_in_batch"] == 2, device.places
    assert found[1] == pytest.approx(found[0], abs=1e-5 if settings.precision == "fp32" else 1e-2)


def test_a_model_is_loaded_to_the_device_and_tried_there(device, policy, tmp_path):
    policy.save(tmp_path / "model")
    there = Policy.load(tmp_path / "model", device=None)
    assert there.model.device == torch.device("cuda:0")
    there.save(tmp_path / "again")
    again = Policy.load(tmp_path / "again", device="cpu")
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor)


# ------------------------------------------------------------------------------------------------------------ whole runs

RUNS = {
    "kl, stale, two steps": {
        "recipe": recipes.dapo(4, 4, 8, surplus="carry"),
        "loss": Loss(kl=0.1),
        "optimizer_steps_per_batch": 2,
    },
    "half precision, recomputed": {"sampling_dtype": "bfloat16", "gradient_checkpointing": True},
    "adapters": {"lora": Lora(2), "sampling_dtype": "bfloat16"},
    "in turn": {"engine": "async", "streaming": Streaming(overlap=False)},
}


def decided(folder):
    """The metrics, without what depends on a clock, and the digest of those that do."""
    return [
        {
            key: pytest.approx(value, abs=1e-4) if isinstance(value, float) else value
            for key, value in line.items()
            if "seconds" not in key and key not in ("breadth", "streaming")
        }
        for line in lines_of(folder)
    ]


@pytest.mark.parametrize(
    "name", ["adapters", *(pytest.param(name, marks=pytest.mark.e2e) for name in RUNS if name != "adapters")]
)
def test_a_run_decides_and_learns_as_on_the_cpu(name, device, on, trainer_of, prompts_of, tmp_path):
    changes = dict(RUNS[name])
    recipe, lora = changes.pop("recipe", recipes.pilot_commit(4, 2, 6, 12)), changes.pop("lora", None)
    found = []
    for place in ("cpu", "cuda"):

        def trainer(batches, place=place):
            policy = on(place)
            policy = policy if lora is None else policy.with_lora(lora, seed=0)
            given = {"eval_every": 30, "heldout": HeldOut(prompts_of(6)), "precision": "fp32", "max_batches": batches}
            return trainer_of(recipe, policy=policy, folder=tmp_path / place, **given | changes)

        trainer(2).run()
        resumed = trainer(4)
        resumed.resume()
        resumed.run()
        weights = {name: tensor.detach().cpu() for name, tensor in resumed.policy.model.named_parameters()}
        found.append((decided(tmp_path / place), weights))
    (cpu, cpu_weights), (there, there_weights) = found
    assert there == cpu
    for key, tensor in cpu_weights.items():
        torch.testing.assert_close(there_weights[key], tensor, rtol=0, atol=1e-5)


def test_what_is_read_of_prompts_and_answers_is_what_the_cpu_reads(device, on, requests):
    tokens = [each.tokens for each in requests]
    found = []
    for place in ("cpu", "cuda"):
        policy = on(place)
        device.reset()
        read = exact_answers(policy.model, tokens, [each[:2] for each in tokens], pad_id=policy.pad_id)
        assert device.synchronisations == (place == "cuda")
        blocks = features_of(policy.model, tokens, pad_id=policy.pad_id, precision="fp32").blocks
        found.append((*read, *blocks.values()))
    for cpu, there in zip(*found, strict=True):
        np.testing.assert_allclose(there, cpu, atol=1e-3)
