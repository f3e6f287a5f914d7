"""What clients hold: images, folders and arrays of a user's own, corpora, and how they are split into shards."""
