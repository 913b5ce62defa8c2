"""What the server from which ranks fork holds ready: the imports and tables of a run's start."""

from pipeline.files.imports import importing

try:
    with importing():
        import matplotlib.backends.backend_agg  # noqa: F401
        import peft  # noqa: F401
        import torch.distributed.optim  # noqa: F401
        import trl.trainer.sft_trainer  # noqa: F401
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        import pipeline.run
        import pipeline.train  # noqa: F401

        get_checkpoint_conversion_mapping("qwen3")
except ImportError as error:
    raise RuntimeError(f"nothing is held ready: {error}") from error  # the server passes it over
