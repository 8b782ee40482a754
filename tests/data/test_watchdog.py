"""A stall is noticed; what the iterator says is passed on."""

import threading

import pytest

from data.errors import DataError
from data.watchdog import next_within


def test_a_stall_is_a_data_error_after_the_given_time():
  def stalled():
    threading.Event().wait()
    yield

  with pytest.raises(DataError, match=r"no batch for 0.05 seconds \(data.stall_seconds\)"):
    next_within(stalled(), 0.05)


def test_elements_ends_and_errors_are_passed_on():
  def one_then_error():
    yield 1
    raise ArithmeticError("two")

  elements = one_then_error()
  assert next_within(elements, 5) == 1
  with pytest.raises(ArithmeticError, match="two"):
    next_within(elements, 5)
  with pytest.raises(StopIteration):
    next_within(iter(()), 5)
