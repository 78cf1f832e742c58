"""Hugging Face export and import: OLMo and OLMoE checkpoints that ``transformers`` loads, and the way back."""
