"""`--doctor`: the list of checks and their runner (main), and the checks (links, machine)."""
