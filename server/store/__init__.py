"""A run on disk: folder, scenario, ledger, tape and checkpoints."""
