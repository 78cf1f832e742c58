"""AdamW on replicated parameters with sharded states: the EP-aware optimizer EPSO and the baseline SO.

The parameters stay whole on every data rank (experts split over expert ranks only); fp32 master weights and moments are
split flat. From bottom to top: :mod:`layout` (which rank owns which elements), :mod:`owners` (process groups),
:mod:`slices` (checkpoints), :mod:`buckets` (flat buffers and collectives), :mod:`adamw` (the optimizer). Nothing here
imports torchtitan; :class:`mula_titan.components.optimizer.AdamWContainer` joins the two.
"""

from mula_titan.components.optimizer_sharding.adamw import ShardedAdamW
from mula_titan.components.optimizer_sharding.owners import OptimizerMeshes, Owners

__all__ = ["OptimizerMeshes", "Owners", "ShardedAdamW"]
