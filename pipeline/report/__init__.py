"""The report of a run and the comparison of runs: tables, the page and the reader of episodes."""
