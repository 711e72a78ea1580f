"""TRL releases above the tested one, and settings that only they have, are named in a warning."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.metadata import version

import pytest
import tiny_trl
from packaging.version import Version
from transformers import TrainingArguments
from trl import GRPOConfig

from rollalloc.drivers.trl.versions import KNOWN_SETTINGS, TESTED, warn_if_newer


@pytest.mark.parametrize(("installed", "newer"), [("1.0.0", False), ("1.16.3", False), ("1.17.0", True), ("2.0", True)])
def test_a_newer_trl_is_named_with_the_one_that_was_tested(installed, newer, caplog, tmp_path):
    warn_if_newer(tiny_trl.settings(tmp_path), installed)
    assert (f"TRL {installed} is newer than 1.16" in caplog.text) == newer
    assert ("pip install 'trl==1.16.*'" in caplog.text) == newer


def test_a_setting_that_the_driver_does_not_know_is_named_where_it_was_changed(caplog, tmp_path):
    @dataclass
    class Later(GRPOConfig):
        group_temperature: float = 1.0
        quiet: bool = False

    warn_if_newer(Later(str(tmp_path), use_cpu=True, group_temperature=2.0), "1.17.0")
    assert "group_temperature=2.0: this setting of TRL 1.17.0 is not known" in caplog.text
    assert "quiet" not in caplog.text


def test_the_installed_trl_has_no_setting_that_the_driver_does_not_know():
    """A setting of a new release is looked at, then honoured, refused or warned of, before it is named as known."""
    if Version(version("trl")).release[:2] > TESTED.release[:2]:
        pytest.skip("not tested yet")
    own = {field.name for field in fields(GRPOConfig)} - {field.name for field in fields(TrainingArguments)}
    assert own <= KNOWN_SETTINGS


def test_a_trainer_of_a_newer_trl_says_so(caplog, monkeypatch, tmp_path):
    monkeypatch.setattr("rollalloc.drivers.trl.versions.version", lambda _: "9.1")
    tiny_trl.trainer(tmp_path, "grpo")
    assert "TRL 9.1 is newer" in caplog.text
