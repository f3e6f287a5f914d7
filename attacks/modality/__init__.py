"""One kind of private data as one value: how it is graded, against which baselines, and how people see it."""
