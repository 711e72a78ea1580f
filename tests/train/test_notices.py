"""What a run says of a reward that fails, never differs, is no success rate or is slow; where notices are off, nothing."""

from dataclasses import replace

import pytest

from rollalloc import Allocator, Limit, recipes
from rollalloc.core import teaching
from rollalloc.core.events import Done
from rollalloc.generate.outcomes import Outcomes
from rollalloc.models.settings import Sampling
from rollalloc.rewards.function import Scored, Unscored
from rollalloc.train.config import Config
from rollalloc.train.evaluation import Breadth, Evaluation
from rollalloc.train.loading import check_run
from rollalloc.train.notices import Notices, counted, of_first_evaluation, of_lost_variety
from rollalloc.train.train import train
from tiny_policy import lines_of


@pytest.mark.parametrize("notices", [True, False])
def test_a_notice_is_logged_once_and_never_if_notices_are_off(notices, run_of, tmp_path, monkeypatch, caplog):
    """By a reward that is always 0, in a window of two batches."""
    monkeypatch.setattr(teaching, "WINDOW", 32)
    run = run_of(target=None, reward="rollalloc.rewards.math:compute_score", heldout=None, single_answer=False)
    train(replace(run, notices=notices), tmp_path)
    lines = lines_of(tmp_path)
    batches = [line for line in lines if line["kind"] == "batch"]
    said = [record.message for record in caplog.records if "the last rollouts were all wrong" in record.message]
    assert len(batches) == 6
    assert [bool(line["teaching"]) for line in batches] == [notices and at > 0 for at in range(6)]
    assert bool(lines[-1].get("teaching")) == notices
    assert len(said) == notices
    assert {line["selection"]["difficulty_trained"] for line in batches} == {1}


def said_at_first(**found):
    """What is said of the first evaluation of a run."""
    return list(of_first_evaluation(Evaluation(**{"standard_error": None, "sampled": 48} | found)))


def test_the_first_evaluation_says_why_samples_have_no_score():
    [said] = said_at_first(accuracy=None, unscored={"KeyError: 'answer'": 40, "timed out": 8})
    assert said == (
        "check the reward function: none of 48 held-out samples has a score: KeyError: 'answer' (40); timed out (8). "
        "The accuracy is not known"
    )
    [said] = said_at_first(accuracy=0.5, unscored={"KeyError: 'answer'": 5})
    assert said.startswith("check the reward function: 5 of 48 held-out samples have no score: KeyError: 'answer' (5).")


def test_the_first_evaluation_says_that_scores_never_differ():
    [negative] = said_at_first(accuracy=-1.0, constant=-1.0)
    assert (
        "all 48 held-out samples scored -1 before any training. Try it on an answer that you know to be right"
        in negative
    )
    [wrong] = said_at_first(accuracy=0.0, constant=0.0)
    assert wrong.startswith("check the reward function: all 48 held-out samples scored 0 before any training.")
    assert "an answer that you know to be right" in wrong
    [right] = said_at_first(accuracy=1.0, constant=1.0, unscored={"timed out": 2})
    assert right.startswith("check the reward function: all 46 held-out samples scored 1 before any training.")
    assert "an answer that you know to be wrong" in right


def test_the_first_evaluation_says_that_a_model_is_never_right_where_accuracy_is_exact():
    breadth = Breadth(8, 0.0016, None, None, None, 2.0, None)
    [said] = said_at_first(accuracy=0.0002, standard_error=0.0, sampled=0, breadth=breadth)
    assert said.startswith(
        "the model hardly ever gives the right answer to a held-out prompt: accuracy 0.0002, pass@8 0.0016"
    )


def of(accuracy, pass_at_k, k=8):
    breadth = Breadth(k, pass_at_k, None, None, None, None, None)
    return Evaluation(accuracy, None, breadth=breadth)


@pytest.mark.parametrize(
    ("first", "now", "says"),
    [
        (of(0.1, 0.45), of(0.32, 0.33), "pass@8 0.33 is hardly above the accuracy 0.32, and was 0.45 to 0.1 before"),
        (of(0.1, 0.45), of(0.32, 0.4), None),  # attempts differ
        (of(0.1, 0.15), of(0.32, 0.33), None),  # they hardly differed before training
        (of(0.1, 0.45), of(0.95, 0.96), None),  # solved
        (of(0.1, 0.45), of(0.0, 0.0), None),  # never right, whatever it answers
        (of(0.1, 0.45, k=1), of(0.32, 0.32, k=1), None),  # one attempt
        (Evaluation(0.1, None), of(0.32, 0.33), None),
        (of(0.1, 0.45), Evaluation(None, None), None),
    ],
)
def test_a_policy_that_has_lost_its_variety_without_being_right_is_told_by_pass_at_k(first, now, says):
    said = of_lost_variety(first, now)
    assert said is None if says is None else says in str(said)


def test_lost_variety_is_said_once_and_compared_with_the_initial_model(caplog):
    looked = Looked()
    for _ in range(2):
        looked.notices.check_later_evaluation(of(0.32, 0.33))  # of a resumed run, whose first evaluation is not known
    assert not caplog.messages
    looked.notices.check_first_evaluation(of(0.1, 0.45))
    for _ in range(2):
        looked.notices.check_later_evaluation(of(0.32, 0.33))
    assert len(caplog.messages) == 1


def test_reasons_are_counted_the_commonest_first_and_made_fit_to_be_shown():
    assert counted({"a": 1, "b\x1b[31m\n": 7, "c": 2, "d": 3}) == "b␛[31m (7); d (3); other reasons (3)"


class Looked:
    """Notices of a run that begins, with a clock and a report that are set by hand."""

    def __init__(self, *, notices=True, max_new_tokens=4):
        self.now, self.report = 0.0, {}
        settings = Config(sampling=Sampling(max_new_tokens), notices=notices)
        self.notices = Notices(settings, lambda: self.report, lambda: self.now)
        self.allocator, self.outcomes = Allocator(recipes.grpo(32, 2), 64, 0), Outcomes()
        self.allocator.ask()  # 64 rollouts are paid

    def after(self, *outcomes, truncated=False):
        for outcome in outcomes:
            self.outcomes.add(outcome, truncated=truncated, tokens=1)
        self.notices.check_rollouts(self.allocator, self.outcomes)


def test_rollouts_without_a_score_are_said_once_with_their_reasons(caplog):
    looked = Looked()
    for _ in range(2):
        looked.after(*[Unscored("ValueError: no answer")] * 30, *[Scored(1.0, 1.0)] * 2)
    [said] = caplog.messages
    assert said.startswith(
        "check the reward function: 30 of the first 64 rollouts have no score: ValueError: no answer (30)"
    )


def test_rollouts_that_are_cut_off_are_said_once_where_no_evaluation_did(caplog):
    looked = Looked()
    for _ in range(2):
        looked.after(*[Scored(0.5, 0.5)] * 64, truncated=True)
    [said] = caplog.messages
    assert said.startswith("64 of the first 64 rollouts were cut off at 4 tokens")


@pytest.mark.parametrize(("right", "said"), [(15, True), (16, False)])
def test_rollouts_that_the_recipe_stops_are_not_said_to_be_cut_off(caplog, right, said):
    """Until its limit is known, the recipe stops nothing, and they are cut off at --max-new-tokens."""
    looked = Looked()
    looked.allocator = Allocator(recipes.grpo(32, 2).replace(limit=Limit()), 64, 0)
    rollouts = [rollout for order in looked.allocator.ask().generate for rollout in order.rollouts]
    looked.allocator.tell([Done(rollout, 1, 1, 4, 0) for rollout in rollouts[:right]])
    looked.after(*[Scored(0.5, 0.5)] * 64, truncated=True)
    assert ("64 of the first 64 rollouts were cut off" in caplog.text) == said


def test_a_slow_reward_is_said_once_where_it_takes_most_of_the_time(caplog):
    looked = Looked()
    looked.now, looked.report = 30.0, {"seconds": 40.0, "workers": 2, "scored": 16, "unscored": {"slow": 4}}
    looked.after()
    looked.after()
    [said] = caplog.messages
    assert said.startswith("the reward function is slow: it took 2 s a sample, 67% of the time so far with 2 workers.")


@pytest.mark.parametrize(("constant", "said"), [(0.0, 2), (None, 0)])
def test_a_reward_that_told_held_out_samples_apart_is_not_suspected_for_a_few_rollouts(constant, said, caplog):
    looked = Looked()
    looked.notices.check_first_evaluation(
        Evaluation(0.0 if constant == 0 else 0.1, None, sampled=48, constant=constant)
    )
    looked.allocator.teaching.add({"all_wrong": 64})
    looked.after()
    assert len(caplog.messages) == said


def test_a_recipe_that_filters_says_that_all_is_wrong_although_it_comes_to_no_batch(run_of, tmp_path, caplog):
    """DAPO makes no batch of groups that are all wrong."""
    parameters = {"groups": 4, "n": 4, "gen_groups": 16}
    reward = "rollalloc.rewards.math:compute_score"
    run = run_of("dapo", parameters, target=None, reward=reward, heldout=None, single_answer=False, max_rollouts=128)
    train(run, tmp_path)
    lines = lines_of(tmp_path)
    assert not [line for line in lines if line["kind"] == "batch"]
    assert [
        text for text in caplog.messages if text.startswith("check the reward function: the last rollouts were all")
    ]
    assert lines[-1]["teaching"]["all_wrong"] == 1


@pytest.mark.parametrize(("recipe", "least"), [("grpo", 16), ("dapo", 16), ("reinforce", 4)])
def test_a_budget_below_one_batch_is_refused_with_the_number_to_type(recipe, least, run_of):
    parameters = {"groups": 4} | {"grpo": {"n": 4}, "dapo": {"n": 4, "gen_groups": 8}, "reinforce": {}}[recipe]
    with pytest.raises(ValueError, match=f"give at least --max-rollouts {least}, or smaller batches"):
        check_run(run_of(recipe, parameters, max_rollouts=least - 1))
    check_run(run_of(recipe, parameters, max_rollouts=least))


@pytest.mark.parametrize(("buffer", "limit_at"), [(2, 0.9), (None, 0.9), (2, None)])
def test_an_overlong_penalty_that_a_limit_makes_idle_is_said(buffer, limit_at, run_of, caplog):
    check_run(run_of("reinforce", {"groups": 4, "limit_at": limit_at}, overlong_buffer=buffer))
    said = "under a lower limit, the penalty does nothing" in caplog.text
    assert said is (buffer is not None and limit_at is not None)
