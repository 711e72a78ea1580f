"""A native run whose loss, gradient or weights are not finite: no step, no checkpoint, and an error that says where."""

import json
import math
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollalloc.files.stamps import stamp_of
from rollalloc.models import checkpoint
from rollalloc.models.weights import Diverged
from rollalloc.train import update
from tiny_policy import RECIPES, checkpoints, lines_of, untimed, weights


@pytest.fixture
def broken_at(monkeypatch):
    """(call, value) → from now on, this call of the loss is multiplied by the value, and all other calls are not."""

    def breaks(call, value):
        losses, calls = update.token_losses, []

        def broken(*given):
            calls.append(1)
            return losses(*given) * (value if len(calls) == call else 1)

        monkeypatch.setattr(update, "token_losses", broken)

    return breaks


def run_of(trainer_of, folder, **changes):
    return trainer_of(RECIPES["grpo"], folder=folder, **{"max_batches": 4, "checkpoint_every": 1} | changes)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_step_that_is_not_finite_is_not_taken_and_its_batch_is_named(trainer_of, tmp_path, broken_at, value):
    trainer = run_of(trainer_of, tmp_path, averaging=20)
    broken_at(3, value)
    with pytest.raises(
        Diverged, match=r"optimizer step 3: .* not taken\. It was batch 3, with the prompts test/"
    ) as error:
        trainer.run()
    assert f"A checkpoint after batch 2 is in {tmp_path}; --resume continues" in str(error.value)
    prompts = dict.fromkeys(row.prompt for row in trainer.allocator.batch.rows)
    assert re.findall(r"test/\d+", str(error.value)) == [f"test/{prompt}" for prompt in prompts]
    kept = load_file(tmp_path / "checkpoints/2/trained.safetensors")
    assert all(torch.equal(kept[name], each) for name, each in trainer.updater.model.named_parameters())
    assert checkpoints(tmp_path) == [1, 2]
    last = lines_of(tmp_path)[-1]
    assert (last["kind"], "optimizer step 3" in last["why"]) == ("failed", True)


def test_where_the_optimizer_is_not_fused_a_step_that_is_not_finite_is_not_taken_either(
    trainer_of, tmp_path, broken_at, monkeypatch
):
    monkeypatch.setattr(update, "_can_fuse", lambda parameters: False)
    trainer = run_of(trainer_of, tmp_path)
    broken_at(2, math.nan)
    with pytest.raises(Diverged, match=r"optimizer step 2: .* not taken"):
        trainer.run()
    kept = load_file(tmp_path / "checkpoints/1/weights.safetensors")
    assert all(torch.equal(kept[name], each) for name, each in trainer.updater.model.named_parameters())


def test_a_fused_optimizer_goes_on_from_the_checkpoint_of_a_plain_one_with_the_same_steps(
    trainer_of, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        patched.setattr(update, "_can_fuse", lambda parameters: False)
        plain = run_of(trainer_of, tmp_path, max_batches=3)
        plain.run()
    shutil.rmtree(tmp_path / "checkpoints/3")
    fused = run_of(trainer_of, tmp_path, max_batches=3)
    assert fused.resume() == 2
    begun = [each.clone() for each in fused.updater.model.parameters()]
    fused.run()
    assert (plain.updater.optimizer.defaults["fused"], fused.updater.optimizer.defaults["fused"]) == (False, True)
    pairs = zip(plain.updater.model.parameters(), fused.updater.model.parameters(), begun, strict=True)
    for expected, made, before in pairs:
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)
        assert (made - before).abs().max() > 1e-5  # a step was taken


def test_the_run_that_was_resumed_is_the_one_that_did_not_diverge(trainer_of, tmp_path, monkeypatch, broken_at):
    run_of(trainer_of, tmp_path / "whole").run()
    losses = update.token_losses
    broken_at(3, math.nan)
    with pytest.raises(Diverged):
        run_of(trainer_of, tmp_path / "broken").run()
    monkeypatch.setattr(update, "token_losses", losses)
    again = run_of(trainer_of, tmp_path / "broken")
    assert again.resume() == 2
    again.run()
    assert untimed(tmp_path / "broken") == untimed(tmp_path / "whole")


def test_without_a_folder_the_error_says_that_there_is_no_checkpoint(trainer_of, broken_at):
    broken_at(1, math.nan)
    with pytest.raises(Diverged, match=r"There is no checkpoint yet\. Look"):
        trainer_of(RECIPES["grpo"], max_batches=2).run()


def test_weights_that_a_step_made_infinite_are_neither_averaged_nor_saved(trainer_of, tmp_path):
    trainer = run_of(trainer_of, tmp_path, averaging=20)
    step, steps = trainer.updater.optimizer.step, []

    def overflowing():
        step()
        steps.append(1)
        if len(steps) == 3:
            with torch.no_grad():
                trainer.updater.model.lm_head.weight[0, 0] = math.inf

    trainer.updater.optimizer.step = overflowing
    with pytest.raises(
        Diverged, match=r"after optimizer step 3: the first of them is lm_head\.weight\. It was batch 3,"
    ):
        trainer.run()
    assert weights(trainer).isfinite().all()  # of the mean
    assert checkpoints(tmp_path) == [1, 2]


def test_weights_that_came_to_nothing_between_two_steps_are_not_saved(trainer_of, tmp_path):
    def poison(line):
        if line["kind"] == "batch" and line["batch"] == 2:
            with torch.no_grad():
                trainer.policy.model.lm_head.weight.fill_(math.nan)

    trainer = run_of(trainer_of, tmp_path, max_batches=2, listener=poison)
    with pytest.raises(
        Diverged, match=r"after batch 2, so no .* lm_head\.weight of weights; a checkpoint after batch 1"
    ):
        trainer.run()
    assert checkpoints(tmp_path) == [1]
    assert not (tmp_path / "model").exists()


def poisoned(folder, number, file, name):
    """Write NaN into a checkpoint as an older release could, so that its manifest is right."""
    place = folder / "checkpoints" / str(number)
    tensors = load_file(place / f"{file}.safetensors")
    tensors[name].fill_(math.nan)
    save_file(tensors, place / f"{file}.safetensors")
    manifest = checkpoint._read_json(place, "manifest.json")
    manifest["files"][f"{file}.safetensors"] = stamp_of(place / f"{file}.safetensors")
    (place / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("file", ["weights", "optimizer"])
def test_a_checkpoint_that_is_not_finite_is_refused_with_the_newest_that_is(trainer_of, tmp_path, file):
    run_of(trainer_of, tmp_path, keep_checkpoints=4).run()
    name = "lm_head.weight" if file == "weights" else "lm_head.weight:exp_avg"
    for number in (4, 3):
        poisoned(tmp_path, number, file, name)
    trainer = run_of(trainer_of, tmp_path, keep_checkpoints=4)
    before = weights(trainer)
    with pytest.raises(
        Diverged, match=rf"checkpoints/4 .* {name} of {file}\. The newest finite .* after batch 2; .* later"
    ):
        trainer.resume()
    assert torch.equal(weights(trainer), before)
    for number in (2, 1):
        poisoned(tmp_path, number, file, name)
    with pytest.raises(Diverged, match=r"No other checkpoint is finite; start a new run with --overwrite"):
        run_of(trainer_of, tmp_path, keep_checkpoints=4).resume()
