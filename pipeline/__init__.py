"""GRPO for tool-using language models: the rooms of the science, the engine and the front desk.

data environments embedded tau2 chat models rollout grpo sft rft evaluation;
errors files config connect distributed checkpoints tracking preflight doctor run_state before_grpo
train run; report plots export commands endpoints customers
"""
