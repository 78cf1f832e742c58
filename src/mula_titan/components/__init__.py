"""Components that drop into any torchtitan project, one torchtitan extension point each."""
