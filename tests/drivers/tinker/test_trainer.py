"""Runs of recipes at a service by hand: they learn, lose nothing, go on after kills, and say what was paid."""

import json
import logging
import signal
from concurrent.futures import Future
from dataclasses import asdict, replace
from threading import Event
from types import SimpleNamespace

import pytest
from fake_tinker import AuthenticationError, Cloud, sequence
from tinker_toys import rewarded

from rollalloc import Limit, recipes
from rollalloc.core.events import NoScores
from rollalloc.drivers.tinker import Prices, Remote, ServiceFailed
from rollalloc.drivers.tinker.service import MODEL_FILE
from rollalloc.models.settings import Clip, Loss, Sampling
from rollalloc.models.weights import Diverged
from rollalloc.processes.stopping import Stopped
from rollalloc.runs.metrics import paths, undeclared
from tiny_policy import killed_after, lines_of, untimed

RECIPES = {
    "grpo": recipes.grpo(groups=4, n=4),
    "dapo": recipes.dapo(groups=4, n=4, gen_groups=8),
    "pilot_commit": recipes.pilot_commit(groups=2, n_pilot=4, n_commit=4, gen_groups=8),
    "pods": recipes.pods(groups=4, n=6, m=4),
    "darts": recipes.darts(groups=4, shortest=3, longest=1),
    "foresight": recipes.foresight(groups=8),
    "raft": recipes.raft(groups=8, n=2),
}
FREE = Remote(concurrency=12)


def without_costs(lines):
    """The lines, without what depends on what was done again."""
    return [{name: value for name, value in line.items() if name not in ("cost", "money")} for line in lines]


@pytest.mark.parametrize("remote", [Remote(), FREE], ids=["waves", "asynchronous"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_spends_its_budget_and_accounts_for_it(by_hand, trainer_of, name, remote):
    lines, cloud = [], Cloud()
    trainer = trainer_of(RECIPES[name], 150, cloud=cloud, remote=remote, listener=lines.append)
    trainer.run()
    accounts = trainer.allocator.accounts()
    assert sum(accounts.values()) == cloud.samples <= 150
    assert accounts["open"] == 0
    assert accounts["trained"] > 0
    assert trainer.engine.generations == {}
    assert lines[-1]["kind"] == "end"
    for line in lines:
        assert not undeclared((name for name, _ in paths(line)), "every line", line["kind"], "Tinker")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("stable_reinforce", "of an earlier one; for rows of older weights use 'ppo' or 'cispo'"),
        ("dro", "loss must be one of importance_sampling, ppo, cispo, got 'dro'"),
    ],
)
def test_a_loss_of_the_service_that_does_not_fit_is_refused_with_those_that_do(loss, said):
    with pytest.raises(ValueError, match=said):
        Remote(loss=loss)


def test_a_policy_learns(sdk, trainer_of):
    lines = []
    trainer = trainer_of(rollouts=1200, heldout=rewarded(), eval_every=600, eval_samples=8, listener=lines.append)
    trainer.run()
    curve = [line["accuracy"] for line in lines if line["kind"] == "eval"]
    assert curve[0] < 0.5
    assert curve[-1] > 0.9
    assert trainer.updater.steps > 10


def test_the_gradient_is_that_of_the_mean_over_tokens(by_hand, trainer_of):
    cloud = Cloud()
    trainer = trainer_of(rollouts=16, cloud=cloud)
    held = {}
    update = trainer.updater.update

    def watched(batch, generations, **kwargs):
        held.update(batch=batch, generations=dict(generations))
        return update(batch, generations, **kwargs)

    trainer.updater.update = watched
    trainer.run()
    total = sum(held["generations"][row.rollout].length for row in held["batch"].rows)
    wanted = sorted(
        (held["generations"][row.rollout].pieces[0].tokens, round(row.advantage * row.weight / total, 7))
        for row in held["batch"].rows
        if row.advantage
    )
    sent = []
    for datum in cloud.datums[0]:
        advantages = datum.loss_fn_inputs["advantages"]
        tokens = (*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"][-1])
        assert datum.loss_fn_inputs["target_tokens"] == list(tokens[1:])
        assert advantages[0] == 0  # of the prompt's second token
        assert len(set(advantages[1:])) == 1
        sent.append((tokens, round(advantages[-1], 7)))
    assert sorted(sent) == wanted
    assert len(sent) < len(held["batch"].rows)  # what has no gradient is not billed


def test_what_is_trained_on_is_what_sampled_it(by_hand, trainer_of):
    lines = []
    trainer_of(rollouts=64, learning_rate=1.0, listener=lines.append).run()
    distances = [line["sampler_kl"] for line in lines if "sampler_kl" in line]
    assert distances
    assert max(distances) < 1e-9
    lines.clear()
    # Two steps on rollouts of one prompt: the second finds weights that the first has moved.
    one = {"episodes": rewarded(1), "optimizer_steps_per_batch": 2, "learning_rate": 1.0}
    trainer_of(recipes.grpo(groups=1, n=16), 64, **one, listener=lines.append).run()
    assert max(line["sampler_kl"] for line in lines if "sampler_kl" in line) > 1e-4


def test_weights_of_a_step_that_is_not_finite_are_not_kept(by_hand, trainer_of, tmp_path):
    cloud = Cloud()
    trainer = trainer_of(rollouts=64, cloud=cloud, folder=tmp_path, checkpoint_every=1)
    step, steps = trainer.service.step, []

    def diverging(*given):
        logprobs, measured = step(*given)
        steps.append(1)
        return logprobs, measured | ({"grad_norm": float("nan")} if len(steps) == 3 else {})

    trainer.service.step = diverging
    with pytest.raises(Diverged, match=r"grad_norm is nan in optimizer step 3: .* with the prompts toy/") as error:
        trainer.run()
    before = trainer.counters.batches
    assert f"was batch {before + 1}, " in str(error.value)
    assert f"A checkpoint after batch {before} is in {tmp_path}" in str(error.value)
    assert [path.split("batch-")[1].split("-")[0] for path in cloud.kept] == [str(n + 1) for n in range(before)]


def test_clipping_is_the_services_own(by_hand, trainer_of):
    cloud = Cloud()
    trainer_of(rollouts=16, cloud=cloud, remote=Remote(loss="ppo"), loss=Loss(clip=Clip(low=0.1, high=0.3))).run()
    [(name, config)] = cloud.losses
    assert name == "ppo"
    assert config == pytest.approx({"clip_low_threshold": 0.9, "clip_high_threshold": 1.3})


# ------------------------------------------------------------------------------------------------------------------ costs


def test_the_services_bill_is_in_the_metrics(by_hand, trainer_of):
    lines, cloud = [], Cloud()
    prices = Prices(prefill=1.0, cached=0.5, sampled=3.0, trained=5.0)
    trainer = trainer_of(rollouts=64, cloud=cloud, listener=lines.append, prices=prices)
    trainer.run()
    cost = lines[-1]["cost"]
    assert cost["prefill"] == 2 * cloud.requests
    assert cost["cached"] == 2 * (cloud.samples - cloud.requests)
    assert cost["sampled"] == trainer.allocator.tokens_paid
    assert cost["trained"] == sum(len(datum.model_input.to_ints()) for batch in cloud.datums for datum in batch)
    assert lines[-1]["money"] == pytest.approx(
        (cost["prefill"] + 0.5 * cost["cached"] + 3 * cost["sampled"] + 5 * cost["trained"]) / 1e6
    )
    assert lines[-1]["currency"] == "USD"


# ------------------------------------------------------------------------------------------------------------ stop, resume


@pytest.mark.parametrize("name", ["grpo", "pilot_commit", "foresight"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(by_hand, trainer_of, tmp_path, name):
    given = {"rollouts": 200, "checkpoint_every": 2, "heldout": rewarded(), "eval_every": 50}
    trainer_of(RECIPES[name], folder=tmp_path / "whole", cloud=Cloud(), **given).run()
    cloud = Cloud()
    with pytest.raises(KeyboardInterrupt):
        trainer_of(RECIPES[name], folder=tmp_path / "killed", cloud=cloud, listener=killed_after(5), **given).run()
    paid = lines_of(tmp_path / "killed")[-1]["cost"]
    trainer = trainer_of(RECIPES[name], folder=tmp_path / "killed", cloud=cloud, **given)
    assert trainer.resume() == 4
    assert asdict(trainer.service.usage) == paid, "what is done again was paid"
    trainer.run()
    whole, killed = untimed(tmp_path / "whole"), untimed(tmp_path / "killed")
    assert without_costs(killed) == without_costs(whole)
    assert killed[-1]["cost"]["sampled"] > whole[-1]["cost"]["sampled"]


def test_what_was_under_way_at_a_kill_is_played_again(by_hand, trainer_of, tmp_path):
    cloud, recipe = Cloud(), replace(RECIPES["dapo"], max_staleness=4)  # goes on beside what is under way
    cloud.faults = {2: Future()}  # never answered: it is under way at each checkpoint
    given = {"rollouts": 120, "checkpoint_every": 1, "remote": FREE, "folder": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        trainer_of(recipe, cloud=cloud, listener=killed_after(3), **given).run()
    cloud.faults = {}
    trainer = trainer_of(recipe, cloud=cloud, **given)
    trainer.resume()
    broken_off = {rollout for order in trainer.allocator.outstanding().generate for rollout in order.rollouts}
    assert broken_off
    told = set()
    tell = trainer.allocator.tell

    def watched(events):
        told.update(event.rollout for event in events if not hasattr(event, "approx_kl"))
        tell(events)

    trainer.allocator.tell = watched
    trainer.run()
    assert broken_off <= told
    assert trainer.allocator.accounts()["open"] == 0


@pytest.mark.parametrize("remote", [Remote(), FREE], ids=["waves", "asynchronous"])
def test_ctrl_c_saves_all_that_was_paid(by_hand, trainer_of, tmp_path, remote):
    cloud, given = Cloud(), {"rollouts": 200, "remote": remote, "folder": tmp_path}

    def listener(line):
        if line["kind"] == "batch" and line["batch"] == 3:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Stopped, match="SIGINT after batch 3"):
        trainer_of(RECIPES["dapo"], cloud=cloud, listener=listener, **given).run()
    asked = cloud.samples
    trainer = trainer_of(RECIPES["dapo"], cloud=cloud, **given)
    assert trainer.resume() == 3
    assert sum(trainer.allocator.accounts().values()) == asked  # none is sampled again
    assert not trainer.allocator.outstanding().generate
    trainer.run()
    assert cloud.samples == sum(trainer.allocator.accounts().values())


def test_a_checkpoint_of_another_run_is_refused(by_hand, trainer_of, tmp_path):
    cloud = Cloud()
    trainer_of(cloud=cloud, folder=tmp_path).run()
    with pytest.raises(ValueError, match=r"run\.model\.rank: saved 32, given 8"):
        trainer_of(cloud=cloud, folder=tmp_path, remote=Remote(rank=8)).resume()
    with pytest.raises(ValueError, match=r"run\.config\.learning_rate"):
        trainer_of(cloud=cloud, folder=tmp_path, learning_rate=1.0).resume()
    with pytest.raises(ValueError, match=r"run\.prompts"):
        trainer_of(cloud=cloud, folder=tmp_path, episodes=rewarded(9)).resume()
    with pytest.raises(FileExistsError, match="a run that has ended"):
        trainer_of(cloud=cloud, folder=tmp_path).run()


def test_weights_that_have_expired_are_said_so_and_nothing_is_changed(by_hand, trainer_of, tmp_path):
    cloud = Cloud()
    trainer_of(cloud=cloud, folder=tmp_path).run()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    cloud.kept.clear()
    with pytest.raises(ServiceFailed, match=r"loading tinker://fake.*has expired"):
        trainer_of(cloud=cloud, folder=tmp_path).resume()
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_the_end_says_where_the_model_is_and_keeps_it_for_ever(by_hand, trainer_of, tmp_path):
    cloud = Cloud()
    trainer_of(cloud=cloud, folder=tmp_path, checkpoint_every=1).run()
    where = json.loads((tmp_path / "model" / MODEL_FILE).read_text())
    assert where["training"] in cloud.kept
    assert cloud.ttl.pop(where["training"]) is None
    assert set(cloud.ttl.values()) == {7 * 86_400}
    assert "sampler_weights" in where["sampler"]


# ----------------------------------------------------------------------------------------------------------------- faults


def test_a_failed_request_costs_its_rollouts_only_and_one_now_and_then_is_no_outage(by_hand, trainer_of):
    cloud = Cloud()
    cloud.faults = dict.fromkeys(range(2, 40, 2), ConnectionError("reset"))
    trainer = trainer_of(cloud=cloud, remote=Remote(give_up_after=2))
    trainer.run()
    assert trainer.allocator.accounts()["failed"] == 4 * 19
    assert trainer.engine.outcomes.unscored == {"sampling failed, ConnectionError: reset": 4 * 19}


class EndsLate(Future):
    """Ends between the first and the second time that somebody asks whether it is done."""

    asked = 0

    def done(self):
        self.asked += 1
        return self.asked > 1


def test_an_order_that_ends_while_others_are_returned_is_returned_next(by_hand, trainer_of):
    trainer = trainer_of(recipes.grpo(groups=1, n=4), 16, remote=FREE)
    start, late = trainer.thread.start, []

    def start_late(*args):
        if late:
            return start(*args)
        late.append(EndsLate())
        late[0].set_result(start(*args).result())
        return late[0]

    trainer.thread.start = start_late
    engine, orders = trainer.engine, trainer.allocator.ask(trainer.engine.capacity()).generate
    engine.submit(orders)
    results = engine.poll() + engine.drain()
    engine.close()
    assert sorted(result.rollout for result in results) == sorted(
        rollout for order in orders for rollout in order.rollouts
    )


def test_an_outage_ends_the_run_and_not_the_prompts(by_hand, trainer_of, tmp_path):
    cloud = Cloud()
    cloud.faults = dict.fromkeys(range(9, 400), ConnectionError("down"))
    given = {"cloud": cloud, "folder": tmp_path, "checkpoint_every": 1, "remote": Remote(give_up_after=4)}
    with pytest.raises(ServiceFailed, match=r"the last 4 requests have no answer.*ConnectionError: down"):
        trainer_of(**given).run()
    cloud.faults = {}
    trainer = trainer_of(**given)
    assert trainer.resume() == 2
    trainer.run()
    assert trainer.allocator.accounts()["failed"] == 0
    assert trainer.allocator.quarantined() == []


CALLS = {
    "create_lora_training_client": "creating the model",
    "save_weights_and_get_sampling_client": "publishing the weights",
    "forward_backward": "training",
    "optim_step": "training",
    "save_state": "saving the weights",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_service_that_hangs_ends_the_run(by_hand, trainer_of, tmp_path, name):
    cloud = Cloud()
    cloud.hung = {name: Event()}
    trainer = trainer_of(cloud=cloud, remote=Remote(request_seconds=0.3), folder=tmp_path)
    try:
        with pytest.raises(ServiceFailed, match=rf"{CALLS[name]} took more than 0\.3 s; resume the run"):
            trainer.run()
    finally:
        cloud.hung[name].set()


GARBAGE = {
    "nothing trained": (
        "forward_backward",
        lambda answer: None,
        "reading the metrics of the step failed, AttributeError",
    ),
    "no outputs": (
        "forward_backward",
        lambda answer: SimpleNamespace(metrics={}, loss_fn_outputs=None),
        "reading the metrics of the step failed, TypeError",
    ),
    "no path": (
        "save_state",
        lambda answer: SimpleNamespace(path=None),
        "expected the path of the saved weights, got None",
    ),
    "no sample": (
        "sample",
        lambda answer: None,
        "the last 16 requests have no answer.*sampling failed, AttributeError",
    ),
}


@pytest.mark.parametrize("how", GARBAGE)
def test_an_answer_that_makes_no_sense_ends_the_run(by_hand, trainer_of, tmp_path, how):
    name, answer, said = GARBAGE[how]
    cloud = Cloud()
    cloud.answers = {name: answer}
    with pytest.raises(ServiceFailed, match=said):
        trainer_of(cloud=cloud, rollouts=400, folder=tmp_path, checkpoint_every=1).run()


def test_a_refusal_ends_the_run_at_once(by_hand, trainer_of):
    cloud = Cloud()
    cloud.faults = {1: AuthenticationError("who are you?")}
    with pytest.raises(ServiceFailed, match="sampling failed, AuthenticationError: who are you"):
        trainer_of(cloud=cloud).run()


MANGLED = {
    "too few": (lambda made: made[:-1], "the service returned 3 of 4 samples", 1),
    "none": (lambda made: [], "the service returned 0 of 4 samples", 4),
    "no logprobs": (
        lambda made: [sequence([1, 0], [], "stop"), *made[1:]],
        "expected 2 log-probabilities, one for each token, got none",
        1,
    ),
    "nan": (lambda made: [sequence([1], [float("nan")], "stop"), *made[1:]], "a log-probability is not finite", 1),
    "no tokens": (lambda made: [sequence([], [], "stop") for _ in made], "expected 1 to 3 tokens, got none", 4),
    "too long": (lambda made: [sequence([1] * 4, [-1.0] * 4, "stop"), *made[1:]], "expected 1 to 3 tokens, got 4", 1),
    "no sequence": (lambda made: [None, *made[1:]], "expected 1 to 3 tokens, got none", 1),
    "unknown token": (
        lambda made: [sequence([99], [-1.0], "stop"), *made[1:]],
        "cannot be decoded, IndexError: string index out of range",
        1,
    ),
}


@pytest.mark.parametrize("how", MANGLED)
def test_an_answer_that_cannot_be_used_has_no_score(sdk, trainer_of, how):
    mangle, reason, each = MANGLED[how]
    cloud = Cloud()
    cloud.mangle = mangle
    trainer = trainer_of(rollouts=16, cloud=cloud)
    if each == 4:
        with pytest.raises(NoScores, match=reason):
            trainer.run()
    else:
        trainer.run()
    assert trainer.engine.outcomes.unscored == {reason: 4 * each}
    assert trainer.allocator.accounts()["failed"] == 4 * each


def test_a_recipe_that_stops_rollouts_is_warned_of_and_pays_them_to_their_end(by_hand, trainer_of, caplog):
    cloud = Cloud()
    with caplog.at_level(logging.WARNING):
        trainer = trainer_of(recipes.darts(groups=4, shortest=2, longest=0, tail="none"), cloud=cloud)
    assert "the Tinker API cannot abort a request" in caplog.text
    trainer.run()
    assert trainer.service.usage.sampled == trainer.allocator.tokens_paid
    caplog.clear()
    trainer_of()
    assert caplog.text == ""


def test_what_streaming_changes_in_a_recipe_is_logged(trainer_of, caplog):
    with caplog.at_level(logging.INFO):
        trainer_of(recipes.pilot_commit(groups=4, n_pilot=2, n_commit=2, gen_groups=8), remote=FREE)
    assert "the oldest of the prompts" in caplog.text


# --------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": Loss(kl=0.1)}, "loss.kl"),
        ({"loss": Loss(clip=Clip(dual=3.0))}, "loss.clip.dual"),
        ({"sampling": Sampling(8, temperature=0.7)}, "temperature"),
    ],
)
def test_settings_that_the_service_has_not_are_refused(by_hand, trainer_of, settings, said):
    with pytest.raises(ValueError, match=said):
        trainer_of(**settings)


def test_a_limit_which_the_service_cannot_keep_is_refused(by_hand, trainer_of):
    with pytest.raises(ValueError, match=r"does not support a limit on the length of rollouts \(limit_at\)"):
        trainer_of(recipes.reinforce(groups=4).replace(limit=Limit()))


def test_a_gate_on_replay_which_the_service_cannot_measure_for_is_refused(by_hand, trainer_of):
    with pytest.raises(ValueError, match=r"does not support a gate on replay \(replay_moved\)"):
        trainer_of(recipes.reinforce(4, replay=4, replay_moved=0.1))


@pytest.mark.parametrize(
    "bad",
    [
        {"rank": 0},
        {"loss": "gspo"},
        {"concurrency": 0},
        {"ahead": 0, "concurrency": 4},
        {"ahead": 2},
        {"request_seconds": 0},
        {"keep_days": 0},
        {"give_up_after": 0},
    ],
)
def test_a_use_of_the_service_out_of_range_is_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Remote(**bad)


def test_without_the_sdk_it_is_said_how_to_get_it(monkeypatch, trainer_of):
    monkeypatch.setitem(__import__("sys").modules, "tinker", None)
    with pytest.raises(ImportError, match=r"pip install 'rollalloc\[tinker\]'"):
        trainer_of()


def test_a_request_without_an_answer_is_given_up(by_hand, trainer_of):
    cloud = Cloud()
    cloud.faults = {2: Future()}
    trainer = trainer_of(rollouts=32, cloud=cloud, remote=Remote(request_seconds=0.2))
    trainer.run()
    assert trainer.allocator.accounts()["failed"] == 4
    assert list(trainer.engine.outcomes.unscored) == ["sampling failed, TimeoutError: "]
