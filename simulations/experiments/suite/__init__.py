"""A paper's table or the suite as a benchmark: submissions of others, and the comparison of kept figures."""
