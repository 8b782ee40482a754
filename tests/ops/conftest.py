"""Kernels are traced once for all calls with equal shapes (dispatch.once)."""

import jax
import pytest


@pytest.fixture(autouse=True)
def changed_sizes_are_seen(request):
  """A test that changes the sizes of a kernel must not meet an older trace, nor leave one."""
  changes = "monkeypatch" in request.fixturenames
  if changes:
    jax.clear_caches()
  yield
  if changes:
    jax.clear_caches()
