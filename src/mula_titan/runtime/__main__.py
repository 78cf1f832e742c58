"""``python -m mula_titan.runtime MODULE ARGS...``: run a torchtitan program on this host's device, CPU included.

torchtitan has no CPU entry, so on a host without an accelerator ``python -m torchtitan.train ARGS`` is written
``python -m mula_titan.runtime torchtitan.train ARGS``. Elsewhere both do the same.
"""

import runpy
import sys

import mula_titan  # noqa: F401  (selects the device before torchtitan is imported)

if len(sys.argv) < 2:
    sys.exit("usage: python -m mula_titan.runtime MODULE [ARGS...], for example torchtitan.train --module mula_titan")
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
