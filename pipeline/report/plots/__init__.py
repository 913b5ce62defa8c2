import os

os.environ["MPLBACKEND"] = "agg"  # a notebook's own cannot be loaded in another process
