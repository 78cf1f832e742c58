"""Does it fit, how fast, how well does it scale: known before a job is queued.

From bottom to top: :mod:`layout` (degrees, groups of ranks), :mod:`parameters` (the model's parameters as data),
:mod:`sharded` (what the optimizer's sharding holds and sends; :mod:`count` counts the same on the real model),
:mod:`activations` (what autograd saves), :mod:`pipeline` (schedules), :mod:`memory`, :mod:`hardware` and
:mod:`communication` (links and collectives), :mod:`step_time`, :mod:`search`, :mod:`report`, and :mod:`plan`, the
command.
"""
