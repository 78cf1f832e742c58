"""The Mula models: OLMo (dense) and OLMoE (Mixture-of-Experts) architectures as a torchtitan ``ModelSpec``."""

from mula_titan.runtime import select_device

select_device()

from mula_titan.model.args import FLAVORS, MulaArgs  # noqa: E402
from mula_titan.model.model import MulaModel  # noqa: E402
from mula_titan.model.spec import model_registry  # noqa: E402

__all__ = ["FLAVORS", "MulaArgs", "MulaModel", "model_registry"]
