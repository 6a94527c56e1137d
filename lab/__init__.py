"""Studies, which compare variants: their plans, runs, results and tables."""
