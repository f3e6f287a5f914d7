"""Data of the clients: images, users' folders and arrays, corpora, and the split into shards."""
