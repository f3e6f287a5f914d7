"""One run from beginning to end: launch Flower, train, attack, and keep or delete what results."""
