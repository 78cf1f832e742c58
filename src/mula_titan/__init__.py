"""mula-titan: pretraining of Mixture-of-Experts language models as a torchtitan project.

Importing this package lets torchtitan run on a CPU host too; on others it changes nothing.
What other torchtitan projects use: :class:`MulaModel` and :func:`model_registry` (the models), :class:`MulaTrainer`
(the training loop) and the components under ``mula_titan.components`` and ``mula_titan.data``.
"""

from mula_titan.runtime import select_device

select_device()

from mula_titan.model import FLAVORS, MulaArgs, MulaModel, model_registry  # noqa: E402

__all__ = ["FLAVORS", "MulaArgs", "MulaModel", "model_registry"]
