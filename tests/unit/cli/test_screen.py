"""Quick imports: what they import is frozen once, and a collector that is off stays off."""

import gc
import subprocess
import sys

import pytest

from flatout.cli.screen import import_without_gc


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that says whether the collector is on, and import nothing yet."""
    (tmp_path / "large_module.py").write_text("import gc\nis_collected = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "large_module"
    gc.unfreeze()
    sys.modules.pop("large_module", None)


def _is_collected(one):
    """Whether collections visit an object: a frozen one is in no generation."""
    return any(each is one for each in gc.get_objects())


@pytest.mark.parametrize("is_on", [True, False])
def test_a_module_is_imported_without_the_collector_and_frozen_once(module, is_on):
    before, early = gc.isenabled(), []
    assert _is_collected(early)
    try:
        (gc.enable if is_on else gc.disable)()
        import_without_gc(module)
        assert gc.isenabled() == is_on
    finally:
        (gc.enable if before else gc.disable)()
    assert not sys.modules[module].is_collected
    assert not _is_collected(early)
    late = []
    import_without_gc(module)
    assert _is_collected(late)


@pytest.mark.parametrize(("flag", "code"), [("-OO", 2), ("-O", 0)])
def test_python_without_docstrings_is_refused_by_name(flag, code):
    """transformers reads them, and would blame the model; -O alone drops assertions only."""
    program = "import sys; from flatout.cli.main import main; sys.exit(main(['doctor']))"
    if code == 0:
        program = "from flatout.cli.screen import import_without_gc; import_without_gc('json.tool')"
    done = subprocess.run([sys.executable, flag, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("PYTHONOPTIMIZE=2 (or -OO), which drops the docstrings" in done.stderr) == bool(code)
    assert "Traceback" not in done.stderr


def test_a_module_that_fails_is_not_frozen_and_the_collector_goes_on(tmp_path, monkeypatch):
    early = []
    (tmp_path / "broken_module.py").write_text("raise ImportError('no such library')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="no such library"):
        import_without_gc("broken_module")
    assert gc.isenabled()
    assert _is_collected(early)
