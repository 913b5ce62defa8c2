"""`python -m pipeline.report FOLDER ...`: the report of a run, or a comparison of runs."""

import sys

from pipeline.report.write import main

sys.exit(main(sys.argv[1:]))
