"""The Mula models: OLMo (dense) and OLMoE (Mixture-of-Experts) architectures as a torchtitan ``ModelSpec``."""

from mula_titan.model.args import FLAVORS, MulaArgs
from mula_titan.model.model import MulaModel
from mula_titan.model.spec import model_registry

__all__ = ["FLAVORS", "MulaArgs", "MulaModel", "model_registry"]
