"""`AllocatedGRPOTrainer`: it trains as rollalloc's own trainer does, and the user's things still work."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import tiny_trl
import torch
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOTrainer

from arithmetic import Gradients, assert_same_gradients, gradients_of, tokens_by_key
from rollalloc import Budget, recipes
from rollalloc.core.recipe import Recipe
from rollalloc.data.prompts import EncodedPrompts, PromptSet
from rollalloc.drivers.trl import tensors
from rollalloc.drivers.trl.generation import Generator
from rollalloc.drivers.trl.tensors import training_inputs
from rollalloc.models.settings import Sampling
from rollalloc.rewards.scorers import InlineScorer
from rollalloc.runs.metrics import undeclared
from rollalloc.tasks.tiny import EOS_ID
from rollalloc.train.config import Config
from rollalloc.train.train import Trainer
from tiny_policy import MODELS, make_policy, tiny_model


def by_trl(out: Any, recipe: Recipe | str, **given: Any) -> tuple[GRPOTrainer, Gradients]:
    """A run whose tokens no weights decide, and the gradient of each step, not clipped."""
    trainer = tiny_trl.trainer(out, recipe, **{"max_grad_norm": 1e9, "learning_rate": 1e-3} | given)
    with tokens_by_key(), gradients_of(trainer.model) as gradients:
        trainer.train()
    return trainer, gradients


def natively(
    recipe: Recipe, batches: int, averaging: int = 0, learning_rate: float = 1e-3, family: str = "llama"
) -> tuple[dict[str, int], Gradients]:
    """The accounts and each step's gradient of rollalloc's own trainer, with the settings of `by_trl`."""
    dataset, policy = tiny_trl.prompts(), make_policy(family=family)
    texts, answers = list(dataset["prompt"]), list(dataset["answer"])
    prompt_set = PromptSet(
        keys=tuple(map(str, range(len(texts)))),
        sources=("test",) * len(texts),
        prompts=tuple(texts),
        ground_truths=tuple(answers),
        extra_infos=({},) * len(texts),
    )
    encoded = EncodedPrompts(prompt_set, tuple(tuple(ids) for ids in policy.tokenizer(texts)["input_ids"]))

    def reward(*, data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
        return tiny_trl.starts_right([solution_str], [ground_truth])[0]

    given = Config(
        seed=3,
        sampling=Sampling(4),
        learning_rate=learning_rate,
        betas=(0.9, 0.999),
        max_grad_norm=1e9,
        averaging=averaging,
        max_batches=batches,
        stop_when_barren=False,
    )
    trainer = Trainer(policy, recipe, encoded, InlineScorer(reward), given)
    with tokens_by_key(), gradients_of(trainer.updater.model) as gradients:
        trainer.run()
    return trainer.allocator.accounts(), gradients


def assert_as_natively(
    trainer: GRPOTrainer, gradients: Gradients, learning_rate: float = 1e-3, family: str = "llama"
) -> None:
    """It decided as rollalloc's own trainer does, and took its gradients."""
    core = trainer.allocation.allocator
    accounts, natives = natively(core.recipe, core.version, trainer.averaged.window, learning_rate, family)
    assert core.accounts() == accounts
    assert_same_gradients(gradients, natives)


# darts_sampled is left out: which rollouts it stops depends on which still run at that moment, and that differs, because
# TRL generates a batch in two parts.
_TRAIN_OTHERWISE = ("darts_sampled",)
# One recipe for each way to make a batch; the tier `e2e` has the others.
_ONE_OF_EACH = ("pilot_commit", "pods", "darts_none", "racing", "reinforce_running", "foresight_replay")
_KINDS = [
    name if name in _ONE_OF_EACH else pytest.param(name, marks=pytest.mark.e2e)
    for name in tiny_trl.RECIPES
    if name not in _TRAIN_OTHERWISE
]


@pytest.mark.parametrize("recipe", _KINDS)
def test_the_trainer_trains_as_rollallocs_own_trainer(recipe, tmp_path):
    assert_as_natively(*by_trl(tmp_path, recipe, max_steps=6, driver={"features": None}))


@pytest.mark.parametrize("recipe", ["grpo", "reinforce_running", "foresight_replay"])
def test_the_trainer_averages_weights_as_rollallocs_own_trainer(recipe, tmp_path):
    assert_as_natively(*by_trl(tmp_path, recipe, max_steps=6, driver={"features": None, "averaging": 20}))


@pytest.mark.parametrize("family", MODELS)
def test_the_one_line_of_the_guide_trains_as_rollallocs_own_trainer(family, tmp_path):
    recipe = recipes.reinforce(groups=16)  # weighs failures by the uncertainty of the tokens
    given = {"model": MODELS[family](), "driver": {"averaging": 20}, "num_generations": 2}
    assert_as_natively(*by_trl(tmp_path, recipe, max_steps=6, **given), family=family)


@pytest.mark.parametrize("family", MODELS)
def test_a_step_of_grpo_takes_the_gradient_of_stock_trl(family, monkeypatch, tmp_path):
    """On the same rollouts: the recipe's batch is the whole data set, and the other trainer is handed its rollouts."""
    data, args = tiny_trl.DISTINCT.select(range(4)), {"max_steps": 1, "max_grad_norm": 1e9}
    ours = tiny_trl.trainer(tmp_path, recipes.grpo(groups=4, n=4), dataset=data, model=MODELS[family](), **args)
    with gradients_of(ours.model) as gradients:
        ours.train()
    made: dict[tuple[int, ...], list[list[int]]] = {}
    for one in ours.allocation.rollouts.values():
        made.setdefault(tuple(one.prompt_tokens), []).append(list(one.made.tokens))
    settings = tiny_trl.settings(tmp_path, **args)
    given = {"processing_class": tiny_trl.tiny_tokenizer()}
    stock = GRPOTrainer(MODELS[family](), tiny_trl.starts_right, settings, data, **given)

    def handed(prompt_ids: Any, *_: Any, **__: Any) -> Any:
        return [made[tuple(ids)].pop() for ids in prompt_ids], None

    monkeypatch.setattr(stock, "_generate_single_turn", handed)
    with gradients_of(stock.model) as expected:
        stock.train()
    assert_same_gradients(gradients, expected)


def test_advantages_are_trls_unless_the_recipe_says_otherwise(tmp_path):
    """Of (1, 0, 0, 0), the issue's figures: stock TRL's by the sample's deviation, 1.4997, or by the population's, 1.732."""

    def one_in_four(completions: list[str], **_: Any) -> list[float]:
        return [float(at % 4 == 0) for at in range(len(completions))]

    def first(recipe: Recipe) -> float:
        trainer = tiny_trl.trainer(tmp_path, recipe, reward=one_in_four, max_steps=1)
        trainer.train()
        return max(trainer._logs["advantages"])

    assert first(tiny_trl.RECIPES["grpo"]) == pytest.approx(0.75 / (0.5 + 1e-4), abs=1e-9)
    assert first(recipes.grpo(groups=4, n=4, deviation="sample")) == pytest.approx(0.75 / (0.5 + 1e-6), abs=1e-9)
    population = (3 / 16) ** 0.5
    assert first(recipes.grpo(groups=4, n=4, deviation="population")) == pytest.approx(0.75 / (population + 1e-6))


@pytest.mark.parametrize(
    "loss_type", ["grpo", *(pytest.param(name, marks=pytest.mark.e2e) for name in ("dapo", "dr_grpo"))]
)
def test_padding_changes_nothing(loss_type, tmp_path):
    """Unscored rollouts leave 13 or so rows, which 4 micro-batches do not divide."""

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
        scores = tiny_trl.starts_right(completions, answer)
        return [None if text.endswith("k1") else score for text, score in zip(completions, scores, strict=True)]

    rows = []

    class Count(TrainerCallback):
        def on_log(self, args, state, control, logs, **_):
            rows.append(logs.get("rollalloc/rows"))

    def train(**changes: Any) -> Gradients:
        given = {"reward": reward, "loss_type": loss_type, "more": {"callbacks": [Count()]}}
        trainer, gradients = by_trl(tmp_path, "grpo", **given, **changes)
        assert trainer.allocation.allocator.accounts()["failed"] > 0
        return gradients

    whole = train()
    assert_same_gradients(whole, train(per_device_train_batch_size=4, gradient_accumulation_steps=4))
    assert any(count is not None and count % 4 for count in rows)


@pytest.mark.parametrize(
    ("changes", "left_out"),
    [
        ({"loss_type": "dapo"}, True),
        ({"loss_type": "dapo", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8}, True),
        ({"loss_type": "dapo", "mask_truncated_completions": True}, True),
        pytest.param({"loss_type": "grpo"}, True, marks=pytest.mark.e2e),
        pytest.param({"loss_type": "dr_grpo"}, True, marks=pytest.mark.e2e),
        ({"loss_type": "bnpo"}, False),
        ({"top_entropy_quantile": 0.5}, False),
    ],
)
def test_rows_without_advantage_are_not_read_and_change_nothing(changes, left_out, tmp_path, monkeypatch):
    """The driver leaves rows with advantage 0 out of the forward pass, unless the loss needs every row.

    Prompts of one word always get the reward 1, so their groups have no advantage. The gradients must equal those of a run
    in which all rows are read.
    """

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        scores = tiny_trl.starts_right(completions, answer)
        return [1.0 if len(prompt.split()) == 2 else score for prompt, score in zip(prompts, scores, strict=True)]

    def train() -> tuple[Gradients, int]:
        read = 0

        def count(trainer: Any, *given: Any) -> dict[str, torch.Tensor]:
            nonlocal read
            inputs = training_inputs(trainer, *given)
            read += len(inputs["advantages"])
            return inputs

        monkeypatch.setattr("rollalloc.drivers.trl.trainer.training_inputs", count)
        _, gradients = by_trl(tmp_path, "grpo", reward=reward, **changes)
        return gradients, read

    gradients, read = train()
    monkeypatch.setattr(tensors, "needs_every_row", lambda trainer: True)
    of_all, all_of_them = train()
    assert all_of_them == 4 * 16
    assert read < 0.8 * all_of_them if left_out else read == all_of_them
    assert_same_gradients(gradients, of_all)


@pytest.mark.parametrize("masks", [True, False])
def test_a_batch_of_which_the_loss_leaves_every_row_out_as_truncated_is_warned_of_once(masks, tmp_path, caplog):
    """The rewards of truncated rollouts differ, so that dynamic sampling keeps their groups, but they teach nothing."""

    def many(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    model = tiny_model()
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    model.lm_head.bias.data[EOS_ID] = -1e4  # no completion ends
    trainer = tiny_trl.trainer(
        tmp_path, "dapo", reward=many, model=model, mask_truncated_completions=masks, max_steps=2
    )
    trainer.train()
    log = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["completions/clipped_ratio"] for line in log] == [1, 1]
    assert [line.get("rollalloc/masked") for line in log] == [16 if masks else None] * 2
    assert all((line["grad_norm"] == 0) == masks for line in log)
    assert caplog.text.count("this step teaches nothing") == masks
    assert caplog.text.count("Raise max_completion_length=") == masks


@pytest.mark.parametrize("use_sampler", [False, True])
def test_log_probabilities_are_those_that_trls_own_forward_pass_gives(use_sampler, tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "pilot_commit", driver={"use_sampler": use_sampler})
    inputs = trainer.model.train() and trainer._generate_and_score_completions([])
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    width = inputs["completion_ids"].shape[1]
    with torch.no_grad():
        theirs = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, width)[0]
    there = inputs["completion_mask"].bool()
    torch.testing.assert_close(inputs["sampling_per_token_logps"][there], theirs[there], rtol=0, atol=1e-5)


def test_rows_from_older_weights_are_weighted_by_the_truncated_ratio(tmp_path):
    """At this learning rate some ratios are above 2, where both trainers cut them."""
    trainer, gradients = by_trl(tmp_path, "pilot_commit", max_steps=4, learning_rate=0.1)
    assert_as_natively(trainer, gradients, learning_rate=0.1)


@pytest.mark.parametrize("adapter", [None, LoraConfig(target_modules=["q_proj", "v_proj"], r=2)])
def test_the_reference_model_is_the_initial_model(adapter, tmp_path):
    tiny_trl.tiny_model().save_pretrained(tmp_path / "model")
    trainer = tiny_trl.trainer(
        tmp_path, "pilot_commit", model=str(tmp_path / "model"), more={"peft_config": adapter}, beta=0.1
    )
    trainer.train()
    divergences = [line["kl"] for line in trainer.state.log_history if "kl" in line]
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert divergences[-1] > 1e-6


def test_the_trainer_counts_what_was_paid(tmp_path):
    paid = []

    def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        paid.extend(len(prompt.split()) + len(ids) for prompt, ids in zip(prompts, completion_ids, strict=True))
        return [float(len(ids) % 2) for ids in completion_ids]

    trainer = tiny_trl.trainer(tmp_path, "pilot_commit", reward=reward)
    trainer.train()
    last = [line for line in trainer.state.log_history if "num_tokens" in line][-1]
    assert last["num_tokens"] == sum(paid) == trainer.state.num_input_tokens_seen
    assert last["rollalloc/rollouts_paid"] == len(paid)
    causes = [value for name, value in last.items() if name.startswith("rollalloc/accounts/")]
    assert sum(causes) == len(paid)
    assert not undeclared((name[len("rollalloc/") :] for name in last if name.startswith("rollalloc/")), "TRL")


@pytest.mark.parametrize("recipe", ["darts_sampled", "darts_none"])
def test_what_a_recipe_stops_is_not_generated_nor_scored(recipe, tmp_path, caplog):
    scored: list[int] = []

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        assert not torch.is_inference_mode_enabled()
        scored.extend(len(ids) for ids in completion_ids)
        return [float(len(ids) % 2) for ids in completion_ids]

    def run(folder: str, use_sampler: bool | None) -> dict[str, float]:
        scored.clear()
        driver = {"use_sampler": use_sampler}
        trainer = tiny_trl.trainer(tmp_path / folder, recipe, reward=reward, driver=driver, max_completion_length=12)
        trainer.train()
        lines = [line for line in trainer.state.log_history if "num_tokens" in line]
        return lines[-1] | {"stopped": sum(line["rollalloc/stopped"] for line in lines)}

    stopping = run("stopping", None)
    assert "generated to its end" not in caplog.text
    causes = {name: value for name, value in stopping.items() if name.startswith("rollalloc/accounts/")}
    assert stopping["stopped"] == causes["rollalloc/accounts/cancelled"] > 0
    assert sum(causes.values()) == stopping["rollalloc/rollouts_paid"]
    assert stopping["rollalloc/rollouts_paid"] - causes["rollalloc/accounts/cancelled"] == len(scored)
    tokens_of_stopped = stopping["rollalloc/tokens_paid"] - sum(scored)
    assert 0 < tokens_of_stopped < 12 * causes["rollalloc/accounts/cancelled"]

    to_the_end = run("to the end", False)
    assert "every rollout is generated to its end" in caplog.text
    assert to_the_end["rollalloc/accounts/cancelled"] == 0 == to_the_end["stopped"]
    assert stopping["rollalloc/tokens_paid"] < to_the_end["rollalloc/tokens_paid"] == sum(scored)


def test_the_logged_reward_is_that_of_everything_generated(tmp_path):
    seen: list[float] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        seen.extend(float(text.startswith("a")) for text in completions)
        return seen[-len(completions) :]

    trainer = tiny_trl.trainer(tmp_path, "dapo", reward=reward, max_steps=1)
    trainer.train()
    line = trainer.state.log_history[0]
    assert line["rollalloc/generated"] == len(seen) > 16
    assert line["reward"] == line["rewards/reward/mean"] == pytest.approx(sum(seen) / len(seen))


def test_evaluation_is_trls_own(tmp_path):
    more = {"eval_dataset": tiny_trl.prompts(8)}
    changes = {"per_device_eval_batch_size": 8, "num_generations_eval": 2}
    ours = tiny_trl.trainer(tmp_path, "pilot_commit", more=more, **changes)
    theirs = GRPOTrainer(
        tiny_trl.tiny_model(),
        tiny_trl.starts_right,
        tiny_trl.settings(tmp_path, **changes),
        tiny_trl.prompts(),
        processing_class=tiny_trl.tiny_tokenizer(),
        **more,
    )
    found = []
    for trainer in (ours, theirs):
        torch.manual_seed(5)
        found.append(
            {name: value for name, value in trainer.evaluate().items() if "time" not in name and "_per_" not in name}
        )
    added = {name: found[0].pop(name) for name in list(found[0]) if "rollalloc" in name}
    assert found[0] == found[1]
    assert not undeclared((name.removeprefix("eval_rollalloc/") for name in added), "TRL")
    logged = ours.state.log_history[-1]
    assert added.keys() <= {name for name in logged if "rollalloc" in name} >= {"eval_rollalloc/breadth/pass_at_k"}
    assert (
        logged["eval_reward"] < logged["eval_rollalloc/breadth/pass_at_k"] <= 2 * logged["eval_reward"]
    )  # the best of two
    assert ours.allocation.allocator.paid == 0


def test_a_spent_budget_ends_the_run_and_the_last_step_moves_nothing(tmp_path):
    recipe = replace(tiny_trl.RECIPES["grpo"], budget=Budget(run_rollouts=40))
    seen = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model, **_):
            seen.append(tiny_trl.weights(model))

    trainer = tiny_trl.trainer(tmp_path, recipe, more={"callbacks": [Watch()]}, max_steps=20, weight_decay=0.1)
    trainer.train()
    assert trainer.allocation.allocator.paid == 40
    assert trainer.allocation.finished is not None
    assert trainer.state.global_step == len(seen) == 4  # 16, 16 and 8 rollouts, and the step that finds nothing
    assert [all(torch.equal(one[name], other[name]) for name in one) for one, other in pairwise(seen)][1:] == [
        False,
        True,
    ]


def test_vllm_generates_where_the_user_has_it(tmp_path):
    trainer = tiny_trl.trainer(tmp_path, "grpo")
    trainer.use_vllm, trainer.vllm_generation = True, tiny_trl.FakeVllm()
    trainer._generator = Generator(trainer, use_sampler=None, keep_logprobs=False)
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([])
    ratio_BT = inputs["importance_sampling_ratio"]
    assert trainer.vllm_generation.synced == 1
    assert ratio_BT.max() <= 2
    assert (ratio_BT[:, 0] != 1).all()
    assert (ratio_BT[:, 1] == 1).all()  # vLLM did not say how likely it was
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.vllm_generation.synced >= 4
    logged = trainer.state.log_history[0]
    # Of each completion, only the first token counts: vLLM did not say how likely the second was.
    assert logged["sampling/sampling_logp_difference/max"] >= logged["sampling/sampling_logp_difference/mean"] > 0
    assert logged["sampling/importance_sampling_ratio/min"] < logged["sampling/importance_sampling_ratio/mean"] <= 2
    assert logged["sampling/importance_sampling_ratio/max"] <= 2


def test_a_model_may_be_the_reward(tmp_path):
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "k1": 3, "k2": 4}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = tiny_trl.tiny_model().config
    config.update({"vocab_size": 5, "num_labels": 1, "initializer_range": 1.0})
    torch.manual_seed(0)
    judge = LlamaForSequenceClassification(config).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    trainer = tiny_trl.trainer(
        tmp_path,
        "grpo",
        reward=[judge, tiny_trl.starts_right],
        more={"reward_processing_classes": [tokenizer, None]},
        max_steps=1,
    )
    trainer.train()
    for rollout in trainer.allocation.generated:
        text = trainer.train_dataset[rollout.prompt]["prompt"] + trainer.processing_class.decode(
            rollout.made.tokens, skip_special_tokens=True
        )
        with torch.no_grad():
            expected = judge(torch.tensor([tokenizer(text)["input_ids"]])).logits.item()
        assert rollout.scores_F[0] == pytest.approx(expected, abs=1e-4)
