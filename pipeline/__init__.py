"""GRPO fine-tuning of tool-using language models in several domains, on any number of ranks."""
