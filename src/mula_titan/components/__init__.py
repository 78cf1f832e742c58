"""Components that drop into any torchtitan project, one torchtitan extension point each."""

from mula_titan.runtime import select_device

select_device()
