"""What several test files use."""

import atexit
import os
import shutil
import signal
import tempfile

if "PYTEST_XDIST_WORKER" not in os.environ:  # before JAX is imported: not the user's, and one for all processes
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jax-cache-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # the tests were started in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """An empty one."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def compile_fast():
    """For tests of what is computed, not how fast: most of their time is compilation."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
