"""Names that are taken, and what `check` says where verl is not installed; both without verl."""

import pytest

from rollalloc.drivers.verl import check
from rollalloc.drivers.verl.reserved import READ_IN_VALIDATION, refuse_columns, refuse_reward_arguments, refuse_turns

VERLS = ["data_source", "prompt", "ability", "reward_model", "extra_info", "agent_name", "index", "tools_kwargs"]


def test_columns_of_verls_own_schema_and_of_a_user_are_taken():
    refuse_columns(
        [*VERLS, "difficulty", "response", "answer", "Größe"], ["index", "split", "answer"], "data.train_files"
    )
    refuse_columns(VERLS, None, "data.train_files")


@pytest.mark.parametrize(
    ("column", "owner"),
    [
        ("uid", "set for each prompt by the trainer"),
        ("__rollout_n__", "set for each prompt by the trainer"),
        ("global_steps", "set for each prompt by the trainer"),
        ("validate", "an argument of verl's agent loops"),
        ("priority", "an argument of verl's agent loops"),
        ("trace", "an argument of verl's agent loops"),
        ("responses", "where verl stores what was generated"),
        ("input_ids", "where verl stores what was generated"),
        ("rm_scores", "where verl stores what was generated"),
        ("reward_scores", "added by verl to what the reward receives"),
    ],
)
def test_a_column_that_would_replace_what_verl_or_the_driver_puts_there_is_refused_by_name(column, owner):
    with pytest.raises(ValueError, match=rf"data\.train_files has columns .*: {column} \({owner}.*Rename or remove"):
        refuse_columns([*VERLS, column], ["index"], "data.train_files")


def test_all_are_named_at_once_and_verls_own_column_of_a_validation_set_is_not():
    columns = [*VERLS, "uid", "__rollout_n__"]
    with pytest.raises(ValueError, match=r"uid \(.*extra_info\.num_turns \(added by verl") as refused:
        refuse_columns(columns, ["num_turns"], "data.val_files", READ_IN_VALIDATION)
    assert "__rollout_n__" not in str(refused.value)


def test_rows_with_loops_of_several_turns_are_refused_under_a_limit():
    refuse_turns(["single_turn_agent"] * 3, "data.train_files")
    with pytest.raises(
        ValueError, match=r"agent_name of data\.train_files must be single_turn_agent in every row, got tool_agent;"
    ):
        refuse_turns(["single_turn_agent", "tool_agent", "tool_agent"], "data.train_files")


def test_arguments_of_a_reward_do_not_replace_the_sample():
    refuse_reward_arguments(["bonus", "max_resp_len"])
    with pytest.raises(ValueError, match="must not set extra_info, ground_truth: verl passes the sample"):
        refuse_reward_arguments(["ground_truth", "bonus", "extra_info"])


def test_without_verl_check_says_what_to_install_and_not_that_it_refuses(monkeypatch, capsys):
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    assert check.main(["data.train_batch_size=8"]) == 3
    shown = capsys.readouterr()
    assert "verl and hydra and omegaconf cannot be imported by" in shown.err
    assert "pip install 'rollalloc[verl]'" in shown.err
    assert not shown.out
