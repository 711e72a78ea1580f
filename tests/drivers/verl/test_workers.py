"""The workers, the client, the plug-in and the trainer's checkpoint with the installed verl; Ray's calls are made up."""

import asyncio
import json
from math import log
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="verl's environment: make verl-test")

from omegaconf import OmegaConf
from ray.exceptions import RayActorError

from rollalloc.drivers.verl import plugin, trainer, workers
from rollalloc.drivers.verl.client import LIVE, Live
from rollalloc.drivers.verl.reserved import LIMIT
from rollalloc.drivers.verl.rounds import SessionOutcome

pytestmark = pytest.mark.verl
LOST = "its agent loop worker died"


@pytest.fixture
def manager(monkeypatch):
    """A manager with one worker that died; `results` says how each call ends."""
    made = workers.Manager.__new__(workers.Manager)
    made.results = {}
    calls = {"outcomes": "listening again", "ping": "ping"}
    made.worker = SimpleNamespace(**{name: SimpleNamespace(remote=lambda at=at: at) for name, at in calls.items()})
    made.results["ping"] = True
    made.agent_loop_workers = [made.worker]
    made._open, made._lost, made._starting, made._listening = {}, [], {}, {}

    def get(call):
        if isinstance(made.results[call], Exception):
            raise made.results[call]
        return made.results[call]

    def wait(calls, num_returns=1, timeout=None):
        return [call for call in calls if call in made.results], []

    monkeypatch.setattr(workers.ray, "get", get)
    monkeypatch.setattr(workers.ray, "wait", wait)
    return made


def test_calls_of_a_dead_worker_that_fail_later_cost_no_session_of_the_one_that_was_started_again(manager):
    manager._open = {("g0", 0): manager.worker, ("g0", 1): manager.worker}
    manager._starting = {"start 0": manager.worker, "start 1": manager.worker}
    manager._listening = {"listen": manager.worker}
    manager.results["start 0"] = RayActorError()
    assert [(o.uid, o.session, o.reason) for o in manager.outcomes()] == [("g0", 0, LOST), ("g0", 1, LOST)]

    manager._open = {("g1", 0): manager.worker}  # given to it after it came back
    manager.results |= {"start 1": RayActorError(), "listen": RayActorError()}
    told = SessionOutcome("g1", 0, tokens=3, reward=1.0, rows=1)
    manager.results["listening again"] = [told]
    assert manager.outcomes() == [told]
    assert not manager._lost
    assert not manager._open


def worker_that_reads(monkeypatch, score, extra):
    async def scores(self, outputs, kwargs):
        outputs[-1].reward_score, outputs[-1].extra_fields = score, {"reward_extra_info": extra}

    monkeypatch.setattr(workers.AgentLoopWorker, "_compute_score", scores)
    made = workers.Worker.__new__(workers.Worker)
    made._reward_timeout = 5
    return made


@pytest.mark.parametrize(
    ("score", "extra", "reason"),
    [
        (1.0, {"acc": float("nan")}, "expected a number"),
        (None, {}, "expected a number"),
        (0.0, {"acc": 0.0, "unscored": 1.0, "reason": "the judge is away"}, "the judge is away"),
    ],
)
def test_what_cannot_be_read_raises_before_rows_are_written(monkeypatch, score, extra, reason):
    worker = worker_that_reads(monkeypatch, score, extra)
    with pytest.raises(workers.NoReward, match=reason):
        asyncio.run(worker._compute_score([SimpleNamespace()], {}))


def worker_of(positions, max_model_len=None):
    made = workers.Worker.__new__(workers.Worker)
    made.rollout_config = SimpleNamespace(max_model_len=max_model_len, prompt_length=10, response_length=20)
    made.model_config = SimpleNamespace(hf_config=SimpleNamespace(max_position_embeddings=positions))
    made.tokenizer = SimpleNamespace(eos_token_id=0)
    made._max_tokens = made._context_length()
    return made


def output_of(prompt, response, last):
    tokens = [5] * (response - 1) + [last]
    return SimpleNamespace(
        prompt_ids=[5] * prompt,
        response_ids=tokens,
        response_mask=[1] * response,
        response_logprobs=None,
        reward_score=1.0,
        extra_fields={},
    )


def test_how_uncertain_a_session_was_is_of_what_the_model_generated():
    """Probabilities 1/2 and 1 of the model's tokens, of a tool's none; unknown where one turn says nothing."""
    worker = worker_of(64, None)
    turn, other = output_of(4, 3, 0), output_of(4, 1, 0)
    turn.response_mask, turn.response_logprobs = [1, 0, 1], [log(0.5), 0.0, 0.0]
    other.response_logprobs = [log(0.25)]
    assert worker._outcome(("g0", 0), [turn, other]).uncertainty == pytest.approx(0.25 + 0.5625)
    other.response_logprobs = None
    assert worker._outcome(("g0", 0), [turn, other]).uncertainty is None


@pytest.mark.parametrize(
    ("positions", "max_model_len", "prompt", "response", "truncated"),
    [
        (64, None, 10, 20, True),  # data.max_response_length
        (64, None, 10, 19, False),
        (25, None, 10, 15, True),  # the model's positions
        (25, None, 10, 14, False),
        (64, 25, 10, 15, True),  # the server's limit
    ],
)
def test_a_rollout_is_truncated_wherever_it_was_cut(positions, max_model_len, prompt, response, truncated):
    worker = worker_of(positions, max_model_len)
    assert worker._outcome(("g0", 0), [output_of(prompt, response, 5)]).truncated is truncated
    assert worker._outcome(("g0", 0), [output_of(prompt, response, 0)]).truncated is False


@pytest.mark.parametrize(("limit", "response", "truncated"), [(12, 12, True), (12, 11, False), (20, 20, True)])
def test_a_rollout_that_its_recipe_stopped_is_truncated(limit, response, truncated):
    token = LIVE.set(Live(limit=limit))
    try:
        assert worker_of(64)._outcome(("g0", 0), [output_of(10, response, 5)]).truncated is truncated
        assert worker_of(64)._outcome(("g0", 0), [output_of(10, response, 0)]).truncated is False
    finally:
        LIVE.reset(token)


@pytest.mark.parametrize(("limit", "asked"), [(12, 12), (30, 20), (0, None)])
def test_a_limit_is_at_most_verls_own(limit, asked):
    """The lengths that the recipe knows may be from before a resume with a lower data.max_response_length."""
    worker, sessions = worker_of(64), []

    async def run_session(index, prompt, sampling_params, options):
        sessions.append((index, sampling_params.get("max_tokens")))

    worker._run_session = run_session
    prompt = {"uid": "g0", "__rollout_n__": 2, LIMIT: limit}
    asyncio.run(worker._run_prompt(prompt, {"temperature": 1.0}, {"validate": False}))
    assert sessions == [(0, asked), (1, asked)]


def test_a_model_of_too_few_positions_is_said(caplog):
    worker_of(30)
    assert not caplog.records
    worker_of(25)
    assert "rollouts end at 25 tokens of prompt and response" in caplog.text


@pytest.mark.parametrize("mode", ["sync", "separate_async", "rolaloc"])
def test_keys_of_ours_that_nothing_would_read_are_refused(mode):
    v1 = {"trainer_mode": mode, "rollalloc": {"recipe": "grpo"}}
    module = SimpleNamespace(validate_config=lambda config: None)
    plugin.check_early(module)
    with pytest.raises(
        ValueError, match=rf"nothing reads it under .*={mode}; set the mode to one of rollalloc, rollalloc_c"
    ):
        module.validate_config(OmegaConf.create({"trainer": {"v1": v1}}))


@pytest.fixture
def saving(tmp_path):
    """A trainer after step 2, as far as its checkpoint needs one."""
    made = trainer.RollallocTrainer.__new__(trainer.RollallocTrainer)
    made.config = OmegaConf.create({"trainer": {"default_local_dir": str(tmp_path)}})
    made.rounds, made.prompts = SimpleNamespace(state_dict=lambda: {"keys": []}), SimpleNamespace(epoch=1)
    made.global_steps = 2
    return made


def test_our_part_of_a_checkpoint_is_whole_when_verl_writes_its_own(saving, monkeypatch, tmp_path):
    seen = []

    def verls_own(self):
        seen.extend(file.name for file in (tmp_path / "global_step_2").iterdir())

    monkeypatch.setattr(trainer.PPOTrainerSync, "_save_checkpoint", verls_own)
    saving._save_checkpoint()
    assert seen == ["rollalloc.json"]
    state = json.loads((tmp_path / "global_step_2" / "rollalloc.json").read_text())
    assert state == {"rounds": {"keys": []}, "epoch": 1, "step": 2}


@pytest.mark.parametrize("text", ["", '{"rounds": {"keys": []}, "epo', "[]", '{"step": 2}', "\x00"])
def test_our_part_of_a_checkpoint_that_is_damaged_is_refused_by_name(saving, monkeypatch, tmp_path, text):
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "global_step_2" / "rollalloc.json").write_text(text)
    saving.config.trainer.resume_mode = "auto"
    monkeypatch.setattr(trainer.PPOTrainerSync, "_load_checkpoint", lambda self: None)
    with pytest.raises(ValueError, match=r"rollalloc\.json is corrupt.*resume from another checkpoint"):
        saving._load_checkpoint()
