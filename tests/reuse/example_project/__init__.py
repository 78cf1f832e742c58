"""A torchtitan project of its own that trains a Mula model with torchtitan's trainer."""
