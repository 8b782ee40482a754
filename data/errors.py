"""The two ways in which data can be at fault."""


class DataError(Exception):
  """Data that was fine when the run was set up no longer is; restarting does not help."""


class RequestError(Exception):
  """What was asked for cannot be done. `problems` holds every reason, one plain sentence each."""

  def __init__(self, *problems: str):
    super().__init__("\n".join(problems))
    self.problems = problems
