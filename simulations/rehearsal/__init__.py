"""A rehearsal: run a Flower app as it lies in its folder, observe how its clients train, and audit what its server sees."""
