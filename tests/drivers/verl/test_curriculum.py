"""What `rollalloc advise --export` writes is a training file of verl's own data set."""

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="needs verl, as in `make verl-test`")

from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset

from curriculum_file import HITS, exported
from rollalloc.drivers.verl.reserved import refuse_columns
from rollalloc.tasks.tiny import word_tokenizer

TEMPLATE = "{% for m in messages %}k{{ m['content'] }} {% endfor %}="


@pytest.mark.verl
def test_verl_reads_a_curriculum_as_its_training_set(tmp_path):
    path = exported(tmp_path, [[{"role": "user", "content": str(number)}] for number in range(len(HITS))])
    tokenizer = word_tokenizer([f"k{number}" for number in range(10)])
    tokenizer.chat_template = TEMPLATE
    config = OmegaConf.create({"cache_dir": str(tmp_path / "cache"), "max_prompt_length": 8, "return_raw_chat": True})
    dataset = RLHFDataset(data_files=str(path), tokenizer=tokenizer, config=config)
    assert len(dataset) == len(HITS)
    row = dataset[3]
    assert row["raw_prompt"][0]["content"] == "3"
    assert (row["data_source"], row["reward_model"]["ground_truth"], row["index"]) == ("mine", "3", 3)
    assert 0.5 < row["rate"] < 1
    refuse_columns(dataset.dataframe.column_names, list(row["extra_info"]), "data.train_files")
