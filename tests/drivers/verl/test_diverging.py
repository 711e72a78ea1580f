"""An update of verl that is not finite ends the run; verl itself would go on, and save."""

import math

import pytest

from rollalloc.core.events import Batch, Row
from rollalloc.drivers.verl.diverging import check_update
from rollalloc.models.weights import Diverged

ROWS = tuple(
    Row(rollout=at, prompt=40 + at // 2, group=at // 2, advantage=1.0, weight=1.0, version=8) for at in range(4)
)
FINE = {"actor/loss": 0.1, "actor/grad_norm": 2.0, "actor/lr": 1e-6, "critic/grad_norm": 1.0}


def check(folder, changes, role="actor", network=None):
    network = {"fsdp_config": {"dtype": "bfloat16"}} if network is None else network
    check_update(FINE | changes, role, network, step=9, batch=Batch(ROWS, 8), folder=folder)


def test_the_error_names_the_step_the_batch_its_rows_and_the_newest_checkpoint(tmp_path):
    check(tmp_path, {"critic/grad_norm": math.nan})  # of the other network
    expected = r"^actor/grad_norm is inf in optimizer step 9: .* batch 9, with the prompts row 40, row 41\. "
    with pytest.raises(Diverged, match=rf"{expected}.*latest_checkpointed_iteration.txt names no checkpoint"):
        check(tmp_path, {"actor/grad_norm": math.inf})
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6")
    with pytest.raises(Diverged, match=rf"{expected}The last checkpoint is {tmp_path}/global_step_6\. Look"):
        check(tmp_path, {"actor/grad_norm": math.inf})


@pytest.mark.parametrize(
    ("role", "changes"), [("actor", {"actor/loss": math.nan}), ("critic", {"critic/grad_norm": math.nan})]
)
def test_loss_and_gradient_of_both_networks_are_checked(role, changes, tmp_path):
    with pytest.raises(Diverged, match=f"^{next(iter(changes))} is nan"):
        check(tmp_path, changes, role)


@pytest.mark.parametrize("engine", ["fsdp_config", "fsdp", "megatron"])
def test_a_scaled_gradient_that_overflows_in_half_precision_is_left_to_verl(engine, tmp_path):
    half = {engine: {"dtype": "float16"}, "other": None}
    check(tmp_path, {"actor/grad_norm": math.inf}, network=half)
    with pytest.raises(Diverged, match=r"^actor/loss is nan in"):
        check(tmp_path, {"actor/grad_norm": math.inf, "actor/loss": math.nan}, network=half)
