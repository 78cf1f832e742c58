"""Exit codes of a training process, for job scripts (docs/reliability.md says what to do on each)."""

CONFIG = 2
"""The configuration cannot work; starting again changes nothing."""

STORAGE = 74
"""Checkpoints cannot be written or read."""

REQUEUE = 75
"""Preempted or out of walltime, and saved: submit the job again."""

HARDWARE = 73
"""A replay differed on a host, which is now in bad_nodes.txt: start again without it."""

HANG = 76
"""A step, save or validation took longer than its limit."""

NUMERICS = 77
"""Loss, gradients or weights went wrong more often than allowed."""

REPLICAS = 78
"""Ranks differ in code, configuration, data or weights."""

PREFLIGHT = 79
"""A device or link failed its check."""


class FatalFault(RuntimeError):
    """Training cannot go on; all ranks raise it alike. ``exit_code`` is what the process ends with."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code
