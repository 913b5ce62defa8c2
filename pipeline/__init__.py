"""GRPO for tool-using language models: wings in the order of the flow, and the files of a run.

common config distributed data environments models rollout checkpoints training evaluation report
preflight, then run_state before_grpo train run, and commands; each imports only what stands before.
"""
