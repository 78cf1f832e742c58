"""mula-titan: pretraining of Mixture-of-Experts language models as a torchtitan project.

What other torchtitan projects use: :class:`MulaModel` and :func:`model_registry` (the models), :class:`MulaTrainer`
(the training loop), :class:`TokenDataLoader`, and the components under ``mula_titan.components``. Importing any of them
lets torchtitan run on a CPU host too; on others it changes nothing.
"""

import importlib
from typing import Any

_HOME = {
    "FLAVORS": "mula_titan.model",
    "MulaArgs": "mula_titan.model",
    "MulaModel": "mula_titan.model",
    "model_registry": "mula_titan.model",
    "MulaTrainer": "mula_titan.trainer",
    "TokenDataLoader": "mula_titan.data.loader",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    # On first use: `mula-titan tokenize` and its workers need no torch.
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
