"""What several test files use."""

import jax
import pytest


@pytest.fixture(scope="module")
def compile_fast():
    """For tests of what is computed, not how fast: most of their time is compilation."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
