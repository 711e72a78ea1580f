"""Tests of `after_import`: a function is called when a module is imported, without importing it first."""

import sys

from rollalloc.drivers.verl.hooks import after_import


def test_a_hook_runs_after_its_module_is_imported(tmp_path, monkeypatch):
    (tmp_path / "watched.py").write_text("value = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "watched", raising=False)
    seen = []
    after_import("watched", lambda module: seen.append(module.value))
    assert seen == []
    import watched

    assert seen == [1]
    after_import("watched", lambda module: seen.append(module.value + 1))
    assert seen == [1, 2]
    del watched
