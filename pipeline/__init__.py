"""GRPO for tool-using language models. The science: data environments embedded tau2 chat models
rollout grpo sft rft evaluation; the engine: errors files config distributed checkpoints tracking
preflight doctor train run; the front desk: report plots export commands endpoints customers."""
