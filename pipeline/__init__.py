"""GRPO for tool-using language models. Science: data environments embedded tau2 chat models rollout
grpo sft rft evaluation. Engine: errors files config distributed checkpoints tracking preflight
doctor connect run_state before_grpo train run. Front desk: report plots export commands endpoints customers
"""
