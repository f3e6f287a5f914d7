"""A rehearsal: run an unchanged Flower app, observe how its clients train, and audit what its server sees."""
