"""The pictures of a run folder and of a comparison of runs."""
