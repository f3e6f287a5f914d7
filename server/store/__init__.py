"""What a run keeps on disk: its folder, scenario, ledger, tape and checkpoints."""
