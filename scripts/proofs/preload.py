"""Imports of a run that the fork server loads in advance, before ranks fork from the server."""

import sys

from pipeline.common.console import importing

try:
    with importing():
        import pipeline.train

        OF_EVERY_RANK = frozenset(sys.modules)  # modules that every rank needs

        import matplotlib.backends.backend_agg  # noqa: F401
        import peft  # noqa: F401
        import torch.distributed.optim  # noqa: F401
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        import pipeline.run  # noqa: F401

        get_checkpoint_conversion_mapping("qwen3")
except ImportError as error:
    raise RuntimeError(f"nothing is held ready: {error}") from error  # ignored by the server
