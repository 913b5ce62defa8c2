"""`python -m pipeline COMMAND ...`: the commands of `pipeline/commands/main.py`."""

import os
import sys

if __name__ == "__main__":  # the current folder must not hide a module of Python or of a library
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from pipeline.commands.main import start_as

    start_as("python -m pipeline")
