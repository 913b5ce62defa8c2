"""The report of a run and the comparison of runs: tables, HTML page, reader of episodes."""
