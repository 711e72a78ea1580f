"""The parts by themselves: attention along trees, batches as samples, weights, the judge's thread."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_trl
import torch
from trl.experimental.async_grpo.packing import TreeRow

from rollalloc.core.events import Batch, Row
from rollalloc.drivers.trl.allocation import Rollout
from rollalloc.drivers.trl.rewards import of_functions
from rollalloc.experimental.trl_async.attention import _seen, attend, attend_without_flash
from rollalloc.experimental.trl_async.judge import Judge
from rollalloc.experimental.trl_async.samples import FILLER, samples_of
from rollalloc.experimental.trl_async.versions import what_is_missing
from rollalloc.experimental.trl_async.weights import WeightMailbox, take_over
from rollalloc.generate.sampler import Generation

REWARDS = of_functions(tiny_trl.starts_right, None, None)


def sample(ids, prompt):
    mask = np.array([0] * prompt + [1] * (len(ids) - prompt))
    return {
        "input_ids": np.array(ids),
        "completion_mask": mask,
        "old_log_probs": np.zeros(len(ids)),
        "advantage": 1.0,
        "group_id": 0,
    }


def test_a_tree_gives_each_sample_the_logits_that_it_has_alone():
    """Shared prompts, a shared beginning, and another prompt, in one row of TRL's."""
    sequences = [[4, 5, 6, 9, 1], [4, 5, 6, 9, 7, 1], [4, 5, 6, 10, 1], [3, 3, 1]]
    row = TreeRow()
    for ids in sequences:
        row.add(sample(ids, len(ids) - 2))
    packed = row.pack()
    model = tiny_trl.tiny_model().eval()
    alone = [torch.log_softmax(model(torch.tensor([ids])).logits[0], -1) for ids in sequences]
    attend_without_flash(model)
    tree = {name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    with torch.no_grad():
        made = model(packed["input_ids"][None], position_ids=packed["position_ids"][None], use_cache=False, **tree)
    logprobs = torch.log_softmax(made.logits[0], -1)
    for index, segment in zip(packed["token_index"].tolist(), packed["segment_id"].tolist(), strict=True):
        at = int(packed["position_ids"][index])
        torch.testing.assert_close(logprobs[index], alone[segment][at], atol=1e-5, rtol=1e-5)
    assert len(packed["input_ids"]) < sum(map(len, sequences))


def rows_of(count: int, short: str | None = None) -> tuple[Batch, list[Rollout]]:
    rows = tuple(Row(number, 0, number // 2, 0.5 * number, 2.0, 7) for number in range(count))
    made = [Generation(number, (9, 1), np.array([-0.5, -0.25], np.float32), False) for number in range(count)]
    return Batch(rows, 8, short), [Rollout(0, (4, 5), each, [1.0], {}, ("k4", "a0")) for each in made]


def test_samples_are_the_cores_rows_in_its_order():
    batch, rollouts = rows_of(4)
    made = samples_of(batch, rollouts, REWARDS, steps=(2, 2), offset=-3, end_id=1)
    assert [each.advantage for each in made] == [0.0, 1.0, 2.0, 3.0]
    assert [each.group_id for each in made] == [0, 0, 1, 1]
    assert {each.model_version for each in made} == {4}
    assert made[1].input_ids.tolist() == [4, 5, 9, 1]
    assert made[1].completion_mask.tolist() == [0, 0, 1, 1]
    assert made[1].old_log_probs.tolist() == [0.0, 0.0, -0.5, -0.25]
    assert made[1].metrics == {"trained/reward": 1.0, "rewards/starts_right": 1.0}
    assert made[1].prompt == [{"role": "user", "content": "k4"}]


@pytest.mark.parametrize(("real", "steps"), [(3, (2, 2)), (5, (3, 3)), (1, (3, 2))])
def test_a_short_batch_is_spread_over_the_micro_batches(real, steps):
    batch, rollouts = rows_of(real, "budget")
    made = samples_of(batch, rollouts, REWARDS, steps=steps, offset=0, end_id=1)
    assert len(made) == steps[0] * steps[1]
    assert sum(each.group_id != FILLER for each in made) == real
    for first in range(0, len(made), steps[1]):
        micro = made[first : first + steps[1]]
        of_batch = [each for each in micro if each.group_id != FILLER]
        fillers = sum(int(each.completion_mask.sum()) for each in micro if each.group_id == FILLER)
        assert fillers == (0 if of_batch else 1), "TRL's loss needs a token in each, and a filler is to add no other"
        assert abs(len(of_batch) - real / steps[0]) < 1
    assert all(not each.advantage for each in made if each.group_id == FILLER)


def test_weights_are_copied_and_taken_over_by_name():
    one, other, mailbox = tiny_trl.tiny_model(1), tiny_trl.tiny_model(2), WeightMailbox()
    mailbox.send_weights(one.named_parameters())
    sent = mailbox.newest
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.zero_()
    take_over(other, sent)
    mine = tiny_trl.tiny_model(1).state_dict()
    assert all(torch.equal(tensor, mine[name]) for name, tensor in other.state_dict().items())
    less = {name: tensor for name, tensor in sent.items() if name != "lm_head.weight"}
    with pytest.raises(ValueError, match=r"1 names are on one side only, lm_head.weight"):
        take_over(other, less)
    with pytest.raises(ValueError, match=r"expected lm_head.weight of shape"):
        take_over(other, {**sent, "lm_head.weight": torch.zeros(2, 2)})


def test_the_judge_says_what_came_of_each_and_cancels_what_is_left():
    judge, held, begun = Judge(), threading.Event(), threading.Event()

    def hangs():
        begun.set()
        held.wait(20)
        return "late"

    def exits():
        raise SystemExit(3)

    assert judge.submit(lambda: 5).result(10) == 5
    with pytest.raises(SystemExit):
        judge.submit(exits).result(10)
    hanging, waiting = judge.submit(hangs), judge.submit(lambda: 6)
    begun.wait(10)
    assert judge.busy_s() > 0
    judge.close()
    held.set()
    for future in (hanging, waiting, judge.submit(lambda: 7)):
        with pytest.raises(CancelledError):
            future.result(10)


def test_what_is_missing_is_named_with_the_version_that_has_it():
    assert "trl==1.16.0" in what_is_missing()
    assert "this is TRL" in what_is_missing()


def test_an_older_trl_is_refused_with_the_version_that_is_needed(monkeypatch):
    import sys

    import rollalloc.drivers

    for name in [name for name in sys.modules if name.startswith("rollalloc.experimental.trl_async")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(rollalloc.drivers, "trl_async", raising=False)
    monkeypatch.setitem(sys.modules, "trl.experimental.async_grpo", SimpleNamespace(__path__=[]))
    with pytest.raises(ImportError, match=r"RolloutWorkerProtocol.*1\.16"):
        __import__("rollalloc.experimental.trl_async")


def test_a_window_ends_at_the_token_itself():
    assert _seen(2, 5, 3, torch.device("cpu")).tolist() == [
        [False, True, True, True, False],
        [False, False, True, True, True],
    ]
    assert _seen(2, 3, None, torch.device("cpu")).tolist() == [[True, True, False], [True, True, True]]


def test_capped_scores_are_refused():
    nothing = torch.zeros(1, 1, 1, 1)
    index = torch.tensor([0])
    with pytest.raises(ValueError, match="caps attention scores at 30"):
        attend(
            torch.nn.Identity(), nothing, nothing, nothing, None,
            tree_kv_index=index, tree_cu_seqlens_q=index, tree_cu_seqlens_k=index, softcap=30.0,
        )  # fmt: skip


def test_more_rows_than_a_step_has_are_refused():
    with pytest.raises(ValueError, match=r"batch of 5 rows, and an optimizer step has 2 × 2"):
        samples_of(*rows_of(5), REWARDS, steps=(2, 2), offset=0, end_id=1)
