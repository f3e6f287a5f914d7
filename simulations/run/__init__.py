"""One run from beginning to end: launch Flower, train, attack, and later delete what is old."""
