"""What a dishonest server bends, and the decoders that read what it wins by that: one idea a file."""
